"""docs/results.md: the text is written by hand, the tables and pictures come from result files.

Between ``<!-- NAME -->`` and ``<!-- end -->`` stands what experiment NAME shows; "costs" is what
all of them took.
"""

import re
from pathlib import Path

from lap2.experiments.reproduce import EXPERIMENTS
from lap2.experiments.show import Shown, show
from lap2.experiments.sweep import read_rows
from lap2.experiments.tables import costs
from lap2.ledger import write_text

__all__ = ["filled", "write"]

_PLACE = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Path, images: Path) -> str:
    """The page with every place filled from ``results``; pictures are written to ``images``.

    Args:
        text: the page.
        results: the folder of the result files, ``EXPERIMENT.jsonl``.
        images: a folder beside the page.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name == "costs":
            everything = [
                row for path in sorted(results.glob("*.jsonl")) for row in read_rows(path)
            ]
            shown = Shown((costs(everything),) if everything else (), ())
        elif name not in EXPERIMENTS:
            raise ValueError(
                f"page must have places for {', '.join(EXPERIMENTS)} and costs only, got {name!r}"
            )
        else:
            source = EXPERIMENTS[name].rows_of or name
            shown = show(name, read_rows(results / f"{source}.jsonl"), images / name)
        if not (shown.tables or shown.pictures):
            how = "" if name == "costs" else f": `lap2 reproduce {name}` makes them"
            return f"{match[1]}\n*No results yet{how}.*\n\n{match[3]}"
        parts = [f"**{table.title}**\n\n{table.markdown()}" for table in shown.tables]
        parts += [f"![{name}]({images.name}/{path.name})\n" for path in shown.pictures]
        return match[1] + "\n" + "\n".join(parts) + "\n" + match[3]

    return _PLACE.sub(fill, text)


def write(page: Path, results: Path) -> None:
    """Fill a page in place; its pictures go to the folder ``images`` beside it."""
    text = page.read_text(encoding="utf-8")
    write_text(page, filled(text, results, page.parent / "images"))
