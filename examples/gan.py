"""A generative adversarial net for a ring of points: an example of `detach`.

The discriminator's step sees `fake.detach()`, so no gradient reaches the generator; the generator's step runs through
both nets and its optimizer touches the generator alone. `python examples/gan.py` prints how the points spread.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import nn, optim

F = nn.functional


def real(rng: np.random.Generator, n: int) -> np.ndarray:
    """Points on a noisy circle of radius 2."""
    angle = rng.uniform(0, 2 * np.pi, n)
    return (2 * np.stack([np.cos(angle), np.sin(angle)], 1) + rng.normal(0, 0.05, (n, 2))).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="600 steps")
    args = parser.parse_args()
    steps = 600 if args.quick else args.steps

    gw.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(
        nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
    )
    g_opt, d_opt = (optim.Adam(net, lr=2e-3, betas=(0.5, 0.99)) for net in (generator, discriminator))

    def judged(x: gw.Tensor, truth: float) -> gw.Tensor:
        score = discriminator(x)
        return F.binary_cross_entropy_with_logits(score, gw.tensor(np.full(score.shape, truth, np.float32)))

    @gw.compile
    def d_step(points: gw.Tensor, noise: gw.Tensor) -> gw.Tensor:
        d_opt.zero_grad()
        loss = judged(points, 1.0) + judged(generator(noise).detach(), 0.0)
        loss.backward()
        d_opt.step()
        return loss

    @gw.compile
    def g_step(noise: gw.Tensor) -> gw.Tensor:
        g_opt.zero_grad()
        loss = judged(generator(noise), 1.0)
        loss.backward()
        g_opt.step()
        return loss

    rng = np.random.default_rng(0)

    def noise() -> np.ndarray:
        return rng.normal(size=(128, 4)).astype(np.float32)

    judged(generator(gw.tensor(noise())).detach(), 0.0).backward()
    assert all(p.grad is None for p in generator.parameters()), "detach keeps the generator out of this step"
    start = np.linalg.norm(generator(gw.tensor(noise())).numpy(), axis=1)
    for k in range(steps):
        d_loss, g_loss = d_step(real(rng, 128), noise()), g_step(noise())
        if (k + 1) % (steps // 4) == 0:
            radius = np.linalg.norm(generator(gw.tensor(noise())).numpy(), axis=1)
            print(
                f"step {k + 1:>5}  discriminator {d_loss.item():.3f}  generator {g_loss.item():.3f}  "
                f"radius {radius.mean():.2f} ± {radius.std():.2f}"
            )
    print(f"radius before {start.mean():.2f}, of the real points 2.00")
    assert abs(radius.mean() - 2) < abs(start.mean() - 2) / 2


if __name__ == "__main__":
    main()
