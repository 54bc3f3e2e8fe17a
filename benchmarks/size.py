"""`python -m benchmarks.size`: lines by folder, and the longest files."""

from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "graphwright"


def main() -> None:
    sizes = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in SRC.rglob("*.py")}
    folders: dict[str, int] = {}
    for path, n in sizes.items():
        parts = path.relative_to(SRC).parts
        folders[parts[0] if len(parts) > 1 else "."] = folders.get(parts[0] if len(parts) > 1 else ".", 0) + n
    for name, n in sorted(folders.items(), key=lambda item: -item[1]):
        print(f"{n:>6}  {name}")
    print(f"{sum(sizes.values()):>6}  in {len(sizes)} files, median {sorted(sizes.values())[len(sizes) // 2]}\n")
    for path, n in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
        print(f"{n:>6}  {path.relative_to(SRC)}")


main()
