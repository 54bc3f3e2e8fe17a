"""Proximal policy optimisation on CartPole: reinforcement learning by gradients, on the same tensors.

Eight carts at once, 128 steps, then 4 rounds over the batch in 4 parts; advantages by GAE(0.95). A truncated episode
bootstraps from the value function, one that falls does not. Source: Schulman et al. 2017, "Proximal Policy
Optimization Algorithms". `python examples/ppo_cartpole.py` prints the mean return of 100 unseen starts.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import nn, optim
from graphwright.evolve.tasks import CartPole

CARTS, STEPS, ROUNDS, PARTS = 8, 128, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, RATE = 0.99, 0.95, 0.2, 0.01, 2.5e-4
Array = np.ndarray


class Agent(nn.Module):
    """Two towers of 64 units: logits of left and right, and the value of a state."""

    def __init__(self, seed: int) -> None:
        super().__init__()

        def tower(outputs: int, gain: float, first: int) -> nn.Sequential:
            sizes, gains = [4, 64, 64, outputs], [2**0.5, 2**0.5, gain]
            layers: list[nn.Module] = []
            for i, (a, b, g) in enumerate(zip(sizes, sizes[1:], gains, strict=False)):
                linear = nn.Linear(a, b)
                nn.init.orthogonal_(linear.weight, g, gw.Generator(1000 * seed + first + i))
                linear.bias.assign(gw.zeros(b))
                layers += [linear, nn.Tanh()]
            return nn.Sequential(*layers[:-1])

        self.policy, self.value = tower(2, 0.01, 0), tower(1, 1.0, 10)

    def forward(self, x: gw.Tensor) -> tuple[gw.Tensor, gw.Tensor]:
        return self.policy(x).log_softmax(-1), self.value(x)[:, 0]


def advantages(rewards: Array, values: Array, after: Array, fell: Array, over: Array) -> Array:
    """Σ (γλ)^k δ of each step [steps, carts], δ = r + γ V(next)(1 - fell) - V; the sum ends with the episode."""
    found, running = np.zeros_like(rewards), np.zeros(rewards.shape[1])
    delta = rewards + GAMMA * after * ~fell - values
    for t in reversed(range(len(rewards))):
        running = delta[t] + GAMMA * LAMBDA * running * ~over[t]
        found[t] = running
    return found


class Carts:
    """Episodes that restart automatically."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.env, self.rng = CartPole(), rng
        self.state, self.age = self.env.reset(rng, (CARTS,)), np.zeros(CARTS, int)

    def step(self, right: Array) -> tuple[Array, Array, Array]:
        """The state that the step led to, whether the pole fell, and whether the episode is over."""
        led, _, fell = self.env.step(right[:, None].astype(float))
        self.age += 1
        over = fell | (self.age >= self.env.limit)
        self.env.state = self.state = np.where(over[:, None], self.rng.uniform(-0.05, 0.05, (CARTS, 4)), led)
        self.age[over] = 0
        return led, fell, over


def learn(seed: int, total: int, report: int = 20) -> tuple[Agent, int]:
    """Train for at most `total` steps of the environment; stops when 20 greedy episodes are 500 long."""
    rng, agent = np.random.default_rng(seed), Agent(seed)
    opt, carts = optim.Adam(agent.parameters(), lr=RATE, eps=1e-5), Carts(np.random.default_rng(seed + 100))

    @gw.compile
    def act(x: gw.Tensor) -> tuple[gw.Tensor, gw.Tensor]:
        with gw.no_grad():
            return agent(x)

    @gw.compile
    def update(x: gw.Tensor, chosen: gw.Tensor, old: gw.Tensor, advantage: gw.Tensor, wanted: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        logs, value = agent(x)
        ratio = ((logs * chosen).sum(-1) - old).exp()
        better = gw.where(advantage > 0, ratio.clamp(max=1 + CLIP), ratio.clamp(min=1 - CLIP)) * advantage
        entropy = -(logs.exp() * logs).sum(-1).mean()
        loss = -better.mean() + 0.5 * ((value - wanted) ** 2).mean() - ENTROPY * entropy
        loss.backward()
        optim.clip_grad_norm_(agent.parameters(), 0.5)
        opt.step()
        return loss

    rounds, done = total // (CARTS * STEPS), 0
    for n in range(rounds):
        opt.lr = RATE * (1 - n / rounds)
        kept: dict[str, list[Array]] = {k: [] for k in ("x", "a", "old", "v", "led", "fell", "over")}
        for _ in range(STEPS):
            x = carts.state.astype(np.float32)
            logs, value = (t.numpy() for t in act(x))
            right = rng.random(CARTS) < np.exp(logs[:, 1])
            led, fell, over = carts.step(right)
            old = np.where(right, logs[:, 1], logs[:, 0])
            for name, part in zip(kept, (x, right, old, value, led, fell, over), strict=True):
                kept[name].append(part.copy())
        done += CARTS * STEPS
        x, a, old, v, led, fell, over = (np.stack(part) for part in kept.values())
        after = np.concatenate([act(np.float32(part))[1].numpy() for part in led]).reshape(v.shape)
        gain = advantages(np.ones_like(v), v, after, fell, over)
        flat = [np.float32(part).reshape(STEPS * CARTS, -1) for part in (x, np.stack([~a, a], -1), old, gain, gain + v)]
        flat[3] = (flat[3] - flat[3].mean()) / (flat[3].std() + 1e-8)
        for _ in range(ROUNDS):
            for rows in np.split(rng.permutation(STEPS * CARTS), PARTS):
                update(flat[0][rows], flat[1][rows], *(part[rows, 0] for part in flat[2:]))
        if (n + 1) % report == 0:
            mean = play(agent, 20, seed + 200 + n)
            print(f"seed {seed}, {done:,} steps: mean return {mean:.0f}")
            if mean == 500:
                break
    return agent, done


def play(agent: Agent, episodes: int, seed: int) -> float:
    """Mean return of the likelier action."""
    env, alive, total = CartPole(), np.ones(episodes, bool), np.zeros(episodes)
    x = env.reset(np.random.default_rng(seed), (episodes,))
    for _ in range(env.limit):
        logs, _ = agent(gw.tensor(np.float32(x)))
        total += alive
        x, _, fell = env.step((logs.numpy()[:, 1:] > logs.numpy()[:, :1]).astype(float))
        alive &= ~fell
    return float(total.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, at most 50 000 steps")
    args = parser.parse_args()
    for seed in range(1 if args.quick else args.seeds):
        agent, steps = learn(seed, 50_000 if args.quick else 400_000)
        mean = play(agent, 100, 10_000 + seed)
        print(f"seed {seed}: {mean:.1f} of 500 steps on 100 unseen starts, after {steps:,} steps")
        assert mean >= (195 if args.quick else 475)


if __name__ == "__main__":
    main()
