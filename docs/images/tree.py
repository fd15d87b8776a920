#!/usr/bin/env python3
"""Draws the tree of a run as an SVG: curl -s http://127.0.0.1:8080/runs/$RUN/tree | docs/images/tree.py > tree.svg"""

import html
import json
import sys

WIDTH, ROW, INDENT, BOX = 760, 58, 62, 44
COLORS = {"completed": "#2e7d32", "failed": "#c62828", "cancelled": "#757575"}


def rows(run, depth=0):
    yield depth, run
    for child in run["children"]:
        yield from rows(child, depth + 1)


def text(x, y, content, **style):
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x}" y="{y}"{attributes}>{html.escape(content)}</text>'


def main():
    tree = list(rows(json.load(sys.stdin)))
    height = ROW * len(tree) + 24
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
          ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14" role="img">')
    print(f'<title>A tree of {len(tree)} runs</title>')
    print(f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff" stroke="#d0d7de"/>')
    last_at = {}
    for index, (depth, run) in enumerate(tree):
        x, y = 16 + depth * INDENT, 15 + index * ROW
        if depth:
            above, left = last_at[depth - 1], x - INDENT + 20
            print(f'<path d="M{left} {above + BOX}V{y + BOX // 2}H{x}" fill="none" stroke="#8c959f" stroke-width="1.5"/>')
        last_at[depth] = y
        print(f'<rect x="{x}" y="{y}" width="{WIDTH - 16 - x}" height="{BOX}" rx="6" fill="#f6f8fa" stroke="#d0d7de"/>')
        print(f'<rect x="{x}" y="{y}" width="5" height="{BOX}" rx="2" fill="{COLORS.get(run["status"], "#1565c0")}"/>')
        name = f'({run["label"]})' if run["label"] else run["agent"]
        print(text(x + 16, y + 18, name, fill="#1f2328", font_weight="bold"))
        task = run["task"] or ""
        length = (WIDTH - x - 230) // 8
        task = " ".join(task.removeprefix("Task: ").split())
        task = task if len(task) <= length else task[: length - 1] + "…"
        print(text(x + 16, y + 36, task, fill="#59636e", font_size=12))
        usage = run["usage"]
        facts = f'{usage["input_tokens"]} in, {usage["output_tokens"]} out'
        print(text(WIDTH - 28, y + 18, f'{run["duration_ms"]} ms', fill="#1f2328", text_anchor="end"))
        print(text(WIDTH - 28, y + 36, facts, fill="#59636e", font_size=12, text_anchor="end"))
    print("</svg>")


if __name__ == "__main__":
    main()
