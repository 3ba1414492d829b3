"""A short document, written once and rendered as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["DPI", "Document"]

DPI = 140  # of every picture in a report

_STYLE = """
:root { --ink: #1b2733; --soft: #5b6b7b; --line: #dde3ea; --tint: #f5f7fa; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
sans-serif; } main { max-width: 1020px; margin: 0 auto; padding: 40px 28px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 10px; padding-top: 18px; border-top: 1px solid var(--line); }
p { margin: 8px 0 12px; max-width: 78ch; }
.lead { color: var(--soft); font-size: 16px; margin-bottom: 22px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0 6px; }
.tile { flex: 1 1 170px; background: var(--tint); border: 1px solid var(--line); border-radius: 10px; padding: 14px
16px; } .tile b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 12px 0 16px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 14px 6px 8px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; background: var(--tint); border-bottom: 2px solid var(--line); vertical-align: bottom; }
td { white-space: nowrap; }
td.wide { white-space: normal; }
tr.mark td { background: #eef6fb; }
td small { color: var(--soft); display: block; }
figure { margin: 16px 0 20px; }
figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 13.5px; margin-top: 8px; max-width: 92ch; }
details { margin: 12px 0; }
summary { cursor: pointer; color: var(--accent); font-weight: 600; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; overflow-x:
auto; font-size: 13px; } footer { margin-top: 48px; color: var(--soft); font-size: 13px; }
@media print { details { display: block; } main { max-width: none; } }
"""


class Document:
    """Headings, paragraphs, tables and pictures in order.

    A table cell is a string, or a pair ``(text, remark)`` whose second part is set smaller.

    Args:
        title: title of the page.
        lead: one sentence under it.
    """

    def __init__(self, title: str, lead: str) -> None:
        self.title = title
        self._markdown = [f"# {title}", lead]
        self._html = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']

    def heading(self, text: str) -> None:
        """A section."""
        self._markdown.append(f"## {text}")
        self._html.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Plain text."""
        self._markdown.append(text)
        self._html.append(f"<p>{escape(text)}</p>")

    def tiles(self, tiles: Sequence[tuple[str, str]]) -> None:
        """The few numbers a reader wants first, as (number, what it is)."""
        self._markdown.append("\n".join(f"- **{number}** {what}" for number, what in tiles))
        cells = "".join(
            f'<div class="tile"><b>{escape(number)}</b><span>{escape(what)}</span></div>' for number, what in tiles
        )
        self._html.append(f'<div class="tiles">{cells}</div>')

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[Any]], mark: int | None = None, fold: str = ""
    ) -> None:
        """A table; row ``mark`` stands out, ``fold`` hides it behind a summary in HTML."""
        lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += ["| " + " | ".join(_markdown_cell(cell) for cell in row) + " |" for row in rows]
        self._markdown.append("\n".join(lines))
        head = "".join(f"<th>{escape(name).replace(' px', '&nbsp;px')}</th>" for name in header)
        body = "".join(
            ("<tr class='mark'>" if number == mark else "<tr>") + "".join(map(_html_cell, row)) + "</tr>"
            for number, row in enumerate(rows)
        )
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        self._html.append(f"<details><summary>{escape(fold)}</summary>{table}</details>" if fold else table)

    def figure(self, path: Path, caption: str, alt: str) -> None:
        """A PNG that lies next to the document; in HTML its bytes are inside the page."""
        self._markdown.append(f"![{alt}]({path.name})\n\n*{caption}*")
        content = path.read_bytes()
        # width in the header of a PNG; in CSS pixels it is as large as the figure was drawn
        width = round(int.from_bytes(content[16:20], "big") * 96 / DPI)
        source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        self._html.append(
            f'<figure><img width="{width}" alt="{escape(alt)}" src="{source}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def code(self, text: str) -> None:
        """A command or a file."""
        self._markdown.append(f"```\n{text.strip()}\n```")
        self._html.append(f"<pre>{escape(text.strip())}</pre>")

    def write(self, folder: Path, stem: str, footer: str) -> tuple[Path, Path]:
        """Write ``<stem>.md`` and ``<stem>.html``; returns both paths."""
        markdown, page = folder / f"{stem}.md", folder / f"{stem}.html"
        markdown.write_text("\n\n".join([*self._markdown, footer]) + "\n", encoding="utf-8")
        page.write_text(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
            + "\n".join(self._html)
            + f"\n<footer>{escape(footer)}</footer>\n</main></body></html>\n",
            encoding="utf-8",
        )
        return markdown, page


def _markdown_cell(cell: Any) -> str:
    text = " ".join(str(part) for part in cell if part) if isinstance(cell, tuple) else str(cell)
    return text.replace("|", "\\|").replace("\n", " ")


def _html_cell(cell: Any) -> str:
    if isinstance(cell, tuple):
        return f"<td>{escape(str(cell[0]))}<small>{escape(str(cell[1]))}</small></td>"
    text = str(cell)
    return f"<td class='wide'>{escape(text)}</td>" if len(text) > 60 else f"<td>{escape(text)}</td>"
