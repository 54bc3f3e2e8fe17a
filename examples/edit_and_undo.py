"""Find the residual branches that a model needs: cut each in turn, measure bits per byte, undo.

`python examples/edit_and_undo.py` takes the bundled model and 8000 characters of text that comes with Python;
`--model DIR --text FILE` takes yours.
"""

import argparse
from pathlib import Path
from time import perf_counter

import graphwright as gw
from graphwright.models.bundled import pydoc_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a Hugging Face directory")
    parser.add_argument("--text", type=Path, help="UTF-8 text to score; by default held-out text of Python's")
    parser.add_argument("--length", type=int, default=8000, help="characters of it")
    parser.add_argument("--quick", action="store_true", help="600 characters, and block 0 only")
    args = parser.parse_args()

    model = gw.open(args.model)
    p = model.program
    text = pydoc_split()[1] if args.text is None else args.text.read_text(encoding="utf-8")
    text = text[: 600 if args.quick else args.length]

    whole = model.perplexity(text).bits_per_byte
    hash_before = p.hash()
    print(f"{model.directory.name}: {whole:.4f} bits per byte on {len(text.encode()):,} bytes\n")
    print(f"{'branch cut':<24}{'bits per byte':>14}{'damage':>10}{'cut and score':>16}")

    damage = {}
    for junction in p.junctions():
        if args.quick and not p.path(junction).startswith("layers.0."):
            continue
        for edge in p.in_edges(junction)[1:]:  # the first edge is the residual stream itself
            branch = p.path(p.graph.source(edge))
            started = perf_counter()
            with p.edit(f"cut {branch}", tool="edit_and_undo.py") as e:
                e.cut(edge)
            score = model.perplexity(text).bits_per_byte
            seconds = perf_counter() - started
            p.undo()
            damage[branch] = score - whole
            print(f"{branch:<24}{score:>14.4f}{damage[branch]:>+10.4f}{seconds:>14.2f} s")

    assert p.hash() == hash_before, "undo brings back structure and every weight byte"
    p.journal.verify()
    least = min(damage, key=damage.get)
    print(f"\nleast needed: {least} ({damage[least]:+.4f} bits per byte)")
    print(f"{len(p.journal)} journal entries, and the program is as opened")


if __name__ == "__main__":
    main()
