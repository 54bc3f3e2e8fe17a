"""Soft actor-critic on the pendulum: off-policy learning with a replay buffer and a squashed normal policy.

Eight pendulums swing at once; each step adds eight transitions and makes one update of two critics, the policy and the
temperature. An episode of 200 steps is truncated, never terminated, so the value always continues. Source: Haarnoja et
al. 2018, "Soft Actor-Critic Algorithms and Applications". `python examples/sac_pendulum.py` prints the mean return of
50 unseen starts; a policy that swings up and balances has about -150, one that does nothing about -1200.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import data, nn, optim
from graphwright import distributions as dist

PENDULUMS, LIMIT, BATCH, WARM = 8, 200, 256, 50
GAMMA, TAU, RATE, TARGET = 0.99, 0.02, 3e-3, -1.0  # the target entropy is minus the number of actions
Array = np.ndarray


class Pendulum:
    """Pendulums with torque in (-2, 2); constants and reward of gymnasium's Pendulum-v1."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.angle, self.speed = rng.uniform(-np.pi, np.pi, count), rng.uniform(-1, 1, count)

    def seen(self) -> Array:
        return np.stack([np.cos(self.angle), np.sin(self.angle), self.speed / 8], -1).astype("f4")

    def step(self, torque: Array) -> Array:
        angle = (self.angle + np.pi) % (2 * np.pi) - np.pi
        reward = -(angle**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = np.clip(self.speed + (15 * np.sin(self.angle) + 3 * torque) * 0.05, -8, 8)
        self.angle = self.angle + self.speed * 0.05
        return reward


def tower(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class Actor(nn.Module):
    """The distribution of the torque in a state."""

    def __init__(self) -> None:
        self.body = tower(3, 2)

    def forward(self, x: gw.Tensor) -> dist.TanhNormal:
        found = self.body(x)
        return dist.TanhNormal(found[:, :1], found[:, 1:].clamp(-5, 2).exp(), -2.0, 2.0)


class Critics(nn.Module):
    """Two estimates of the value of a torque in a state, of which the smaller one is believed."""

    def __init__(self) -> None:
        self.first, self.second = tower(4, 1), tower(4, 1)

    def forward(self, x: gw.Tensor, torque: gw.Tensor) -> tuple[gw.Tensor, gw.Tensor]:
        joined = gw.cat([x, torque / 2], -1)
        return self.first(joined)[:, 0], self.second(joined)[:, 0]


def learn(seed: int, steps: int, report: int = 1000) -> Actor:
    """Train for a number of steps of all pendulums."""
    gw.manual_seed(seed)
    rng, buffer = np.random.default_rng(seed), data.ReplayBuffer(100_000, seed=seed)
    actor, critics, target = Actor(), Critics(), Critics()
    target.load_state_dict(critics.state_dict())
    log_temperature = gw.Parameter(gw.tensor([0.0]))
    actor_opt, critic_opt = optim.Adam(actor.parameters(), lr=RATE), optim.Adam(critics.parameters(), lr=RATE)
    heat_opt = optim.Adam([log_temperature], lr=RATE)

    @gw.compile
    def act(x: gw.Tensor) -> gw.Tensor:
        with gw.no_grad():
            return actor(x).sample()

    @gw.compile
    def update(x: gw.Tensor, torque: gw.Tensor, reward: gw.Tensor, then: gw.Tensor) -> gw.Tensor:
        temperature = log_temperature.detach().exp()
        with gw.no_grad():
            action, log_prob = actor(then).rsample_and_log_prob()
            wanted = reward + GAMMA * (gw.minimum(*target(then, action)) - temperature * log_prob[:, 0])
        critic_opt.zero_grad()
        first, second = critics(x, torque)
        loss = ((first - wanted) ** 2).mean() + ((second - wanted) ** 2).mean()
        loss.backward()
        critic_opt.step()
        actor_opt.zero_grad()
        action, log_prob = actor(x).rsample_and_log_prob()
        (temperature * log_prob[:, 0] - gw.minimum(*critics(x, action))).mean().backward()
        actor_opt.step()
        heat_opt.zero_grad()
        (-log_temperature.exp() * (log_prob.detach().mean() + TARGET)).sum().backward()
        heat_opt.step()
        optim.ema_update(target, critics, TAU)
        return loss

    env = Pendulum(PENDULUMS, rng)
    for step in range(steps):
        if step % LIMIT == 0:
            env = Pendulum(PENDULUMS, rng)
        x = env.seen()
        torque = rng.uniform(-2, 2, (PENDULUMS, 1)).astype("f4") if step < WARM else np.asarray(act(x))
        reward = env.step(torque[:, 0].astype(float))
        buffer.add(x=x, torque=torque, reward=(reward / 8).astype("f4"), then=env.seen())
        if step >= WARM:
            update(*buffer.sample(BATCH).values())
        if (step + 1) % report == 0:
            print(f"seed {seed}, {step + 1} steps: mean return {play(actor, 20, seed + step):.0f}")
    return actor


def play(actor: Actor, episodes: int, seed: int) -> float:
    """Mean return of the median action."""
    env, total = Pendulum(episodes, np.random.default_rng(10_000 + seed)), np.zeros(episodes)
    with gw.no_grad():
        for _ in range(LIMIT):
            total += env.step(np.asarray(actor(gw.tensor(env.seen())).median, "f8")[:, 0])
    return float(total.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, 2500 steps")
    args = parser.parse_args()
    for seed in range(1 if args.quick else args.seeds):
        mean = play(learn(seed, 2500 if args.quick else 5000, 500), 50, seed)
        print(f"seed {seed}: mean return {mean:.0f} on 50 unseen starts")
        assert mean >= (-600 if args.quick else -300)


if __name__ == "__main__":
    main()
