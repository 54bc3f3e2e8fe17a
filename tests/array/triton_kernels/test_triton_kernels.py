"""Triton's kernels beside the CPU backend in Triton's interpreter, and compiled ahead of time for GPUs.

Operands, results and scratch are in buffers with canaries. Kernels run twice and give equal bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphwright.ops import OPS
from triton_process import facts, run

pytestmark = pytest.mark.triton
FOLDER = Path(__file__).parent
SCRIPT = FOLDER.parents[2] / "scripts" / "triton_kernels.py"


ELSEWHERE = {
    "torch copies, without arithmetic": "pad_slice concat stack flip roll tile repeat_interleave pad tril triu iota",
    "cuBLAS and cuDNN": "matmul linear linear_int8 solve conv conv_transpose conv_weight unfold fold",
    "torch's multi-tensor functions": "rmsprop_step lion_step muon_step adagrad_step adadelta_step adamax_step "
    "nadam_step radam_step asgd_step rprop_step ema_step",
    "torch's kernels: few entries, or not the time of a step": "size pad_backward rope_table rope_dynamic rope_longer "
    "index_fill one_hot bincount nonzero max_pool avg_pool avg_pool_backward adaptive_avg_pool "
    "adaptive_avg_pool_backward interpolate interpolate_backward multinomial sample_token sort",
    "not written yet": "expert_mlp_backward expert_probe gate gate_grad routed_attention routed_attention_backward "
    "routed_entries routed_attention_cached linear_scan sdpa_selected sdpa_selected_backward block_gate_gradient "
    "block_entropy block_entropy_backward",
    "its expansion has few launches": "logsumexp select_blocks",
    "generated kernels": "junction",
    "torch.distributed": "all_reduce all_gather reduce_scatter all_to_all broadcast reduce send recv all_reduce_start "
    "all_reduce_wait reduce_scatter_start reduce_scatter_wait all_gather_start all_gather_wait",
}
"""Why ops have no Triton kernel in the table -> these ops. Elementwise ops have generated kernels, views need none."""


OTHERS = {name for name, row in OPS.items() if not row.traits.elementwise and row.view is None}
WRITTEN = OTHERS - {name for names in ELSEWHERE.values() for name in names.split()}
"""Ops with handwritten kernels."""


def check_interpreted(cache: Path, depth: str) -> None:
    found = facts(FOLDER / "interpreted_kernels.py", cache, depth, TRITON_INTERPRET="1")
    wrong = {name: fact for name, fact in found.items() if fact and not name.endswith(" seconds")}
    assert not wrong, "\n".join(f"{name}: {fact}" for name, fact in list(wrong.items())[:20])
    assert len(found) > 40


def test_kernels_match_the_cpu_backend_in_the_interpreter(tmp_path: Path) -> None:
    check_interpreted(tmp_path, "quick")


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_kernels_match_the_cpu_backend_for_all_combinations(tmp_path: Path) -> None:
    check_interpreted(tmp_path, "deep")


def check_compiled(found: dict[str, Any]) -> int:
    """Check what compiled kernels use; return their number."""
    made = {name: fact for name, fact in found.items() if isinstance(fact, dict)}
    wrong = {n: f for n, f in made.items() if f["spills"] or f["atomics"] or f["shared"] > 227 * 1024 or not f["elf"]}
    assert not wrong, "\n".join(f"{name}: {fact}" for name, fact in wrong.items())
    return len(made)


def test_kernels_compile_for_a_gpu_that_is_not_there_and_20_shapes_share_their_code(tmp_path: Path) -> None:
    found = facts(FOLDER / "compiled_kernels.py", tmp_path)
    assert OTHERS - {*found["ops"]} == OTHERS - WRITTEN
    refused = found.pop("refused")
    assert {name for name, why in refused.items() if why} == {"part of a large bias", "many rows"}, refused
    assert check_compiled(found) >= 2
    counts = {name: count for name, count in found.items() if name.startswith("forms of ")}
    assert len(counts) >= 15
    kernels = {"forms of embedding_backward": 2, "forms of adamw_step": 2}  # launches of one case
    # n = 112 is divisible by 16, which doubles the forms
    assert {name: count for name, count in counts.items() if count > 2 * kernels.get(name, 1)} == {}


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_kernels_of_all_cases_compile_without_spills_and_atomics(tmp_path: Path) -> None:
    found = facts(FOLDER / "compiled_kernels.py", tmp_path, "deep")
    del found["refused"]
    assert check_compiled(found) > 3 * 60


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_the_script_compiles_all_kernels_for_three_generations_of_gpus(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "--json", "--targets", "80,90,100")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)["kernels"]
    assert {row["target"] for row in found} == {"sm_80", "sm_90", "sm_100"}
    patterns = {name for name in WRITTEN if name.startswith("block_")}  # in tests/ops/test_block_attention_triton.py
    assert {row["op"] for row in found} >= WRITTEN - patterns
