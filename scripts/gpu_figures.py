"""The figures of `make gpu`: times on a GPU beside torch eager, torch.compile, FlexAttention and a raw CUDA graph.

Every figure times its peers in the same rounds, alternating, by events of the device, and compares their values. All
functions take the device's name and return facts. On a device other than a GPU they run with small sizes, to check the
code, and without peers that compile.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

import graphwright as gw
from graphwright.array import CPU, Device, NDArray, backend, from_dlpack, from_numpy
from graphwright.ops import call
from graphwright.program import Builder, Program

Call = Callable[[], object]
GPU = torch.cuda.is_available()
ROUNDS, WARM_UP, SHORTEST = (25, 3, 2e-3) if GPU else (2, 1, 0.0)
"""Rounds, calls before the first, and seconds that the calls of one round take at least."""
OURS = "graphwright"


def there(device: str) -> str:
    """Return the name of the device for torch: a device other than a GPU is in host memory."""
    return device if device.startswith("cuda") else "cpu"


def wait() -> None:
    """Wait for torch's device, and for the simulated one."""
    if GPU:
        torch.cuda.synchronize()


def elapsed(each: Call, repeats: int) -> float:
    """Return the milliseconds of a call that is repeated, by events of the device."""
    if not GPU:
        started = perf_counter()
        for _ in range(repeats):
            each()
        return (perf_counter() - started) * 1e3 / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        each()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def times(calls: Mapping[str, Call]) -> dict[str, float]:
    """Return the median milliseconds of each call, measured in alternating rounds."""
    repeats, taken = {}, {name: list[float]() for name in calls}
    for name, each in calls.items():
        for _ in range(WARM_UP):
            each()
        wait()
        started = perf_counter()
        each()
        wait()
        repeats[name] = max(1, min(1000, int(SHORTEST / max(perf_counter() - started, 1e-7))))
    for _ in range(ROUNDS):
        for name, each in calls.items():
            taken[name].append(elapsed(each, repeats[name]))
    return {name: median(found) for name, found in taken.items()}


def guarded(makers: Mapping[str, Callable[[], Call]]) -> tuple[dict[str, Call], dict[str, str]]:
    """Make the call of each peer and run it once; return those that run, and the errors of the others."""
    calls, errors = {}, {}
    for name, make in makers.items():
        if not GPU and any(word in name for word in ("compile", "Flex", "raw")):
            continue
        try:
            made = make()
            made()
            wait()
            calls[name] = made
        except Exception as error:  # a peer that is not there must not stop the figure
            errors[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return calls, errors


def compared(makers: Mapping[str, Callable[[], Call]], ours: str = OURS) -> dict[str, Any]:
    """Return milliseconds of each peer, and each one's time as a multiple of ours."""
    calls, errors = guarded(makers)
    found = times(calls)
    facts: dict[str, Any] = {f"{name}, ms": round(ms, 5) for name, ms in found.items()}
    if ours in found:
        facts |= {f"{name} / {ours}": round(ms / found[ours], 3) for name, ms in found.items() if name != ours}
    return facts | {f"{name}, error": text for name, text in errors.items()}


def on(device: str, array: Any) -> NDArray:
    """Return an array of the device."""
    return from_numpy(np.asarray(array)).to(Device(device))


def seen(array: NDArray) -> torch.Tensor:
    """Return torch's tensor of an array on the device, without a copy, after all work on it."""
    driver = backend(array.device).driver
    assert driver is not None
    driver.synchronize()
    return array.impl


def shared(device: str, tensor: torch.Tensor) -> NDArray:
    """Return an array over the memory of torch's tensor; on a device other than a GPU, a copy."""
    return from_dlpack(tensor).to(Device(device))


def replayed(plan: Any, feeds: Mapping[str, Any], feed: bool = True) -> Call:
    """Return the call that replays a captured plan without copying its outputs.

    Without `feed` the inputs are not copied before each replay: memory of the plan is reused, so later replays compute
    with other numbers, which is only allowed where no number is an index.
    """
    space = plan.executable()
    for _ in range(4):
        space.run(feeds)
    if str(space.state) != "captured":
        raise RuntimeError(f"the plan is {space.state}")

    def each() -> None:
        if feed:
            space.feed(feeds)
        space.execute()

    return each


def raw_graph(run: Callable[[], Any]) -> Call:
    """Return the replay of a CUDA graph of a function of torch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        run()
    return graph.replay


# -- memory-bound kernels ----------------------------------------------------------------------------------------------
SIZE = 1 << 26 if GPU else 1 << 10
ROWS, WIDTH = (8192, 4096) if GPU else (8, 32)
SIDE = 4096 if GPU else 16


def copy_bandwidth(device: str) -> Mapping[str, Any]:
    """Bytes read and written per second by a copy of 256 MiB, ours and torch's."""
    x, y = (torch.rand(SIZE, device=there(device)) for _ in range(2))
    a, b = on(device, np.zeros(SIZE, np.float32)), on(device, np.zeros(SIZE, np.float32))
    kernels = backend(Device(device))
    found = times({"graphwright": partial(kernels.copy, a, b), "torch": partial(y.copy_, x)})
    return {f"{name}, GB/s": round(2 * 4 * SIZE / ms / 1e6, 1) for name, ms in found.items()}


def elementwise_chain(device: str) -> Mapping[str, Any]:
    """Ten elementwise ops on 64 Mi numbers in one plan: bytes per second, as a share of those of a copy."""
    b = Builder("elementwise")
    x = h = b.input("x", (SIZE,))
    for k in range(5):
        h = b.sigmoid(b.add(b.mul(h, x), x), name=f"s{k}") if k % 2 else b.tanh(b.mul(h, x), name=f"t{k}")
    b.output(h, "y")
    p, data = b.build(), torch.rand(SIZE, device=there(device))

    def eager(x: torch.Tensor) -> torch.Tensor:
        h = x
        for k in range(5):
            h = torch.sigmoid(h * x + x) if k % 2 else torch.tanh(h * x)
        return h

    feed = on(device, np.zeros(SIZE, np.float32))
    seen(feed).copy_(data)
    plan = p.compile(x=(SIZE,), device=device)
    error = (seen(plan(x=feed)["y"]) - eager(data)).abs().max().item()
    facts = compared({
        "graphwright": partial(replayed, plan, {"x": feed}, False),
        "torch eager": lambda: partial(eager, data),
        "torch.compile": lambda: partial(torch.compile(eager), data),
        "copy": lambda: partial(torch.empty_like(data).copy_, data),
    })  # fmt: skip
    if "graphwright, ms" in facts and "copy, ms" in facts:
        facts["share of copy bandwidth"] = round(facts["copy, ms"] / facts["graphwright, ms"], 3)
    return {**facts, "difference": error}


def norms(device: str) -> Mapping[str, Any]:
    """rms_norm and layer_norm of [8192, 4096] in float32 and bfloat16, beside torch's."""
    facts: dict[str, Any] = {}
    for kind in (torch.float32, torch.bfloat16):
        x, w = (
            torch.randn(ROWS, WIDTH, device=there(device), dtype=kind),
            torch.rand(WIDTH, device=there(device), dtype=kind),
        )
        ours = [shared(device, t) for t in (x, w)]
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "rms_norm": (lambda o=ours: call("rms_norm", *o, eps=1e-6),
                         lambda x=x, w=w: torch.nn.functional.rms_norm(x, (WIDTH,), w, 1e-6)),
            "layer_norm": (lambda o=ours: call("layer_norm", *o, rank=1, eps=1e-5),
                           lambda x=x, w=w: torch.nn.functional.layer_norm(x, (WIDTH,), w, None, 1e-5)),
            "softmax": (lambda o=ours: call("softmax", o[0], axis=-1), lambda x=x: torch.softmax(x, -1)),
        }  # fmt: skip
        for name, (mine, theirs) in pairs.items():
            label = f"{name} {str(kind).removeprefix('torch.')}"
            found = compared({"graphwright": lambda m=mine: m, "torch": lambda t=theirs: t})
            facts |= {f"{label}: {key}": value for key, value in found.items()}
    return facts


# -- products ----------------------------------------------------------------------------------------------------------
def products(device: str) -> Mapping[str, Any]:
    """Products of 4096 x 4096 matrices through cuBLAS, beside torch: the cost of our call."""
    facts: dict[str, Any] = {}
    for kind in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(SIDE, SIDE, device=there(device), dtype=kind) for _ in range(2))
        ours = [shared(device, t) for t in (a, b)]
        found = compared({"graphwright": lambda o=ours: partial(call, "matmul", *o),
                          "torch": lambda a=a, b=b: partial(torch.mm, a, b)})  # fmt: skip
        label = str(kind).removeprefix("torch.")
        facts |= {f"{label}: {key}": value for key, value in found.items()}
        if "graphwright, ms" in found:
            facts[f"{label}: TFLOP/s"] = round(2 * SIDE**3 / found["graphwright, ms"] / 1e9, 1)
    return facts


# -- a small Llama -----------------------------------------------------------------------------------------------------
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
BATCH, TOKENS = 4, 512
if not GPU:
    LLAMA |= {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    BATCH, TOKENS = 2, 16


def llama(device: str, compute: str = "float32") -> Any:
    """Return our model with random weights."""
    from graphwright.models.architectures.architecture import Config
    from graphwright.models.open import create

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        return create(Config.read(Path(folder)), compute=compute).to(device)


class TorchLlama(torch.nn.Module):
    """The same model as people write it in torch, with our weights."""

    def __init__(self, weights: Mapping[str, torch.Tensor], device: str, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.names = {key: key.replace(".", "_") for key in weights}
        for key, value in weights.items():
            self.register_parameter(self.names[key], torch.nn.Parameter(value.to(there(device), kind)))
        width, heads = LLAMA["hidden_size"], LLAMA["num_attention_heads"]
        half = width // heads // 2
        angle = torch.arange(LLAMA["max_position_embeddings"])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().to(there(device), kind))
        self.register_buffer("sin", angle.sin().to(there(device), kind))

    def weight(self, key: str) -> torch.Tensor:
        """Return a parameter by its key in a checkpoint."""
        return getattr(self, self.names[key])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of ids [B, T]."""
        linear, norm = torch.nn.functional.linear, torch.nn.functional.rms_norm
        width, heads, groups = LLAMA["hidden_size"], LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"]
        count, length = ids.shape
        x, cos, sin = (
            torch.nn.functional.embedding(ids, self.weight("model.embed_tokens.weight")),
            *(t[:length] for t in (self.cos, self.sin)),
        )

        def rotated(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        for k in range(LLAMA["num_hidden_layers"]):
            at = f"model.layers.{k}."
            h = norm(x, (width,), self.weight(at + "input_layernorm.weight"), LLAMA["rms_norm_eps"])
            q, key, v = (
                linear(h, self.weight(f"{at}self_attn.{n}_proj.weight")).view(count, length, m, -1).transpose(1, 2)
                for n, m in (("q", heads), ("k", groups), ("v", groups))
            )
            h = torch.nn.functional.scaled_dot_product_attention(
                rotated(q), rotated(key), v, is_causal=True, enable_gqa=True
            )
            x = x + linear(h.transpose(1, 2).reshape(count, length, -1), self.weight(at + "self_attn.o_proj.weight"))
            h = norm(x, (width,), self.weight(at + "post_attention_layernorm.weight"), LLAMA["rms_norm_eps"])
            gate, up = (linear(h, self.weight(f"{at}mlp.{n}_proj.weight")) for n in ("gate", "up"))
            x = x + linear(torch.nn.functional.silu(gate) * up, self.weight(at + "mlp.down_proj.weight"))
        h = norm(x, (width,), self.weight("model.norm.weight"), LLAMA["rms_norm_eps"])
        return linear(h, self.weight("lm_head.weight"))


def peer_of(model: Any, device: str, kind: torch.dtype = torch.float32) -> TorchLlama:
    """Return torch's model with the weights of ours, in order of the program."""
    weights = {key: torch.from_numpy(v.data.to(CPU).to_numpy().copy()) for key, v in model.program.weights.items()}
    return TorchLlama(weights, device, kind)


def feeds_of(device: str, tokens: int = TOKENS, batch: int = BATCH) -> tuple[np.ndarray, dict[str, NDArray]]:
    """Return random ids, and the inputs of the program on the device."""
    ids = np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (batch, tokens))
    return ids, {"ids": on(device, ids), "positions": on(device, np.tile(np.arange(tokens), (batch, 1)))}


def _forward(device: str, compute: str, kind: torch.dtype) -> Mapping[str, Any]:
    model = llama(device, compute)
    ids, feeds = feeds_of(device)
    plan = model.program.compile(ids=ids.shape, positions=ids.shape, device=device, freeze=True)
    torch_ids, peer = torch.from_numpy(ids).to(there(device)), peer_of(model, device, kind)
    with torch.no_grad():
        theirs = peer(torch_ids).float()
        ours = seen(plan(feeds)["logits"]).float()
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()

        def eager(run: Any = peer) -> Call:
            def each() -> None:
                with torch.no_grad():
                    run(torch_ids)

            return each

        facts = compared({
            "graphwright": partial(replayed, plan, feeds),
            "torch eager": eager,
            "torch.compile": lambda: eager(torch.compile(peer)),
            "torch.compile, reduce-overhead": lambda: eager(torch.compile(peer, mode="reduce-overhead")),
            "raw CUDA graph of torch eager": lambda: raw_graph(partial(peer, torch_ids)),
        })  # fmt: skip
    return {**facts, "difference": error}


def forward_float32(device: str) -> Mapping[str, Any]:
    """Forward pass of a Llama of 8 layers, width 1024, 4 texts of 512 tokens, float32 without TF32."""
    return _forward(device, "float32", torch.float32)


def forward_bfloat16(device: str) -> Mapping[str, Any]:
    """The same in bfloat16."""
    return _forward(device, "bfloat16", torch.bfloat16)


def training(device: str) -> Mapping[str, Any]:
    """A training step of the same Llama: forward, backward, AdamW, in float32."""
    from graphwright import optim

    model = llama(device)
    ids, _ = feeds_of(device)
    inputs = {"ids": ids, "positions": np.tile(np.arange(TOKENS), (BATCH, 1)), "targets": np.roll(ids, -1, 1)}
    peer = peer_of(model, device)

    def score(logits: Any, targets: Any) -> Any:
        return gw.nn.functional.cross_entropy(logits, targets, dim=-1)

    step = gw.compile_step(model.program, score, optim.AdamW(model.program, 1e-4), inputs, device=device)
    given = {name: on(device, value) for name, value in inputs.items()}
    ids_, targets = (torch.from_numpy(inputs[name]).to(there(device)) for name in ("ids", "targets"))

    def stepped(run: Any) -> Callable[[], Call]:
        def make() -> Call:
            chosen = torch.optim.AdamW(peer.parameters(), 1e-4, fused=GPU)

            def each() -> torch.Tensor:
                chosen.zero_grad()
                loss = torch.nn.functional.cross_entropy(run(ids_).flatten(0, 1), targets.flatten())
                loss.backward()
                chosen.step()
                return loss

            return each

        return make

    first = float(step(given).data.to(CPU).to_numpy())
    theirs = float(torch.nn.functional.cross_entropy(peer(ids_).flatten(0, 1), targets.flatten()).item())
    facts = compared({
        "graphwright": lambda: partial(step, given),
        "torch eager": stepped(peer),
        "torch.compile": stepped(torch.compile(peer)),
    })  # fmt: skip
    return {**facts, "first losses": [first, theirs]}


def decoding(device: str) -> Mapping[str, Any]:
    """Milliseconds of one greedy token of the same Llama with a cache, after a prompt of 128 tokens; one sequence."""
    model = llama(device)
    ids = np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (1, 128))
    facts = {}
    for where in (device, "cpu"):
        model.to(where)
        model.generate(ids, 8)
        tokens, started = (64 if where == device else 8), perf_counter()
        made = model.generate(ids, tokens)
        facts[f"{OURS if where == device else f'{OURS} on the CPU'}, ms per token"] = round(
            (perf_counter() - started) * 1e3 / max(len(made.ids), 1), 3
        )
    return facts


def edit_to_result(device: str) -> Mapping[str, Any]:
    """Milliseconds from an edit (a layer skipped) to the logits of the edited Llama; torch.compile compiles again."""
    model = llama(device)
    ids, feeds = feeds_of(device)
    p = model.program

    def result() -> None:
        plan = p.compile(ids=ids.shape, positions=ids.shape, device=device, freeze=True)
        plan(feeds)["logits"].to_numpy()

    for _ in range(4):
        result()
    taken = []
    for k in range(1, 6):
        started = perf_counter()
        with p.edit("a gain") as e:
            e.set_weight(f"model.layers.{k}.input_layernorm.weight", lambda w: w * 1.01)
        result()
        taken.append((perf_counter() - started) * 1e3)
    peer = peer_of(model, device)
    torch_ids = torch.from_numpy(ids).to(there(device))
    compiled: dict[str, Any] = {}
    try:
        with torch.no_grad():
            if not GPU:
                raise RuntimeError("no GPU")
            torch.compile(peer)(torch_ids)
            started = perf_counter()
            torch._dynamo.reset()
            torch.compile(peer)(torch_ids).cpu()
            compiled["torch.compile, ms"] = round((perf_counter() - started) * 1e3, 1)
    except Exception as error:
        compiled["torch.compile, error"] = f"{type(error).__name__}: {error}"[:300]
    return {"graphwright, ms": round(median(taken), 2), **compiled}


def beside_cpu(device: str) -> Mapping[str, Any]:
    """The same forward pass on the device and on this machine's CPU, a text of 512 tokens."""
    model = llama(device)
    ids, _ = feeds_of(device, batch=1)
    facts = {}
    for where in (device, "cpu"):
        model.to(where)
        taken = []
        for _ in range(4 if where == "cpu" else 8):
            started = perf_counter()
            model.logits(ids)
            taken.append((perf_counter() - started) * 1e3)
        facts[f"{where}, ms"] = round(median(taken[1:]), 3)
    return facts | {"times faster": round(facts["cpu, ms"] / facts[f"{device}, ms"], 1)}


# -- sparse attention --------------------------------------------------------------------------------------------------
def sparse_attention(device: str) -> Mapping[str, Any]:
    """Attention of 8 heads of width 64 over 8192 tokens, 10 % of the causal blocks of 64: beside SDPA and Flex."""
    tokens, block, heads, width = (8192, 64, 8, 64) if GPU else (128, 16, 2, 16)
    pattern = tenth(tokens, block)
    b = Builder("sparse")
    q, k, v = (b.input(name, (1, heads, tokens, width), "bfloat16") for name in "qkv")
    b.output(b.block_sdpa(q, k, v, b.pattern("sparse", pattern), scale=width**-0.5, planes=1, name="attention")[0], "y")
    p: Program = b.build()
    torch_qkv = [torch.randn(1, heads, tokens, width, device=there(device), dtype=torch.bfloat16) for _ in range(3)]
    feeds = {n: shared(device, t) for n, t in zip("qkv", torch_qkv, strict=True)}
    shapes = {name: (1, heads, tokens, width) for name in "qkv"}
    plan = p.compile(shapes, device=device)
    mask = torch.from_numpy(np.asarray(pattern.to_dense())).to(there(device)).reshape(-1, tokens, tokens)[0].bool()
    theirs = torch.nn.functional.scaled_dot_product_attention(*torch_qkv, attn_mask=mask).float()
    error = (seen(plan(feeds)["y"]).float() - theirs).abs().max().item()
    blocks = mask.view(tokens // block, block, tokens // block, block).any(3).any(1)

    def flex() -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        allowed = mask
        made = create_block_mask(lambda b, h, i, j: allowed[i, j], None, None, tokens, tokens, BLOCK_SIZE=128)
        return partial(torch.compile(flex_attention), *torch_qkv, block_mask=made)

    facts = compared({
        "graphwright": partial(replayed, plan, feeds, False),
        "SDPA, dense causal": lambda: partial(
            torch.nn.functional.scaled_dot_product_attention, *torch_qkv, is_causal=True
        ),
        "FlexAttention": flex,
    })  # fmt: skip
    causal = (tokens // block) * (tokens // block + 1) / 2
    return {**facts, "share of causal blocks": round(blocks.sum().item() / causal, 3), "difference": error}


def tenth(tokens: int, block: int) -> Any:
    """Return a causal pattern of about 10 % of the blocks."""
    from graphwright.patterns import Pattern

    pattern, rng, rows = Pattern(tokens, block), np.random.default_rng(0), tokens // block
    for q in range(rows):
        for k in {q, *rng.integers(0, q + 1, max(q // 10, 1)).tolist()}:
            pattern.connect(q, int(k))
    return pattern


FIGURES: dict[str, Callable[[str], Mapping[str, Any]]] = {
    "copy bandwidth": copy_bandwidth, "elementwise chain": elementwise_chain, "norms": norms, "products": products,
    "forward, float32": forward_float32, "forward, bfloat16": forward_bfloat16, "training step": training,
    "decoding": decoding, "edit to result": edit_to_result, "beside the CPU": beside_cpu,
    "sparse attention": sparse_attention,
}  # fmt: skip
"""Name -> the function that measures it."""
