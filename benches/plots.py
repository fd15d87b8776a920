#!/usr/bin/env python3
"""Draws the plots of docs/PERFORMANCE.md from the tables beside them, which hold what the benches printed.

    benches/plots.py [--check]

Writes SVG files into docs/plots, readable on light and on dark pages. `--check` writes nothing and fails if one is not that of its
table.
"""

import argparse, html, pathlib, re, sys

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 16, 16, 74, 40
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.axis { stroke: #8c959f }
.s0 { fill: #8c959f } .s1 { fill: #0969da } .s2 { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d7e0 }
  .s0 { fill: #818b98 } .s1 { fill: #4493f8 } .s2 { fill: #3fb950 }
}
"""


def bars(title, groups, series):
    """Groups of bars: `series` has a value for each group, by its name."""
    highest = max(value for values in series.values() for value in values)
    step = (WIDTH - LEFT - RIGHT) / len(groups)
    bar = step * 0.8 / len(series)
    floor, scale = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
    parts = [f'<text class="title" x="{LEFT}" y="22">{html.escape(title)}</text>']
    at = LEFT
    for index, name in enumerate(series):
        parts.append(f'<rect class="s{index}" x="{at}" y="34" width="12" height="12" rx="2"/>'
                     f'<text x="{at + 18}" y="45">{html.escape(name)}</text>')
        at += 40 + 7.5 * len(name)
    for group, label in enumerate(groups):
        begin = LEFT + step * (group + 0.1)
        for index, values in enumerate(series.values()):
            height = scale * values[group] / highest
            x, y = begin + bar * index, floor - height
            parts.append(f'<rect class="s{index}" x="{x + 2:.1f}" y="{y:.1f}" width="{bar - 4:.1f}" height="{height:.1f}" rx="2"/>'
                         f'<text x="{x + bar / 2:.1f}" y="{y - 5:.1f}" text-anchor="middle">{shown(values[group])}</text>')
        parts.append(f'<text x="{LEFT + step * (group + 0.5):.1f}" y="{floor + 20}" text-anchor="middle">{html.escape(label)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}"/>')
    lines = "\n".join(parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
            f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n{lines}\n</svg>\n")


def shown(value):
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def clients_text(clients):
    return f"{clients:.0f} client{'s' if clients > 1 else ''}"


def nodes_text(nodes):
    return f"{nodes:.0f} node{'s' if nodes > 1 else ''}"


def plot_cost():
    """Of the table of `cargo bench --bench axed -- single`."""
    found = re.findall(r"^\| (\d+) clients?(?:, processor time a run)? \| ([\d.,]+) µs \| ([\d.,]+) µs \|",
                       (DOCS / "PERFORMANCE.md").read_text(), re.MULTILINE)
    values = [[number(it) for it in row] for row in found]
    series = {name: [row[column] for row in values] for column, name in ((1, "bare handler"), (2, "axed"))}
    return bars("Processor time of a run with one turn, µs", [clients_text(row[0]) for row in values], series)


def nodes_table():
    """The rows of the table of `benches/cluster.py`."""
    text = (DOCS / "PERFORMANCE.md").read_text()
    table = re.search(r"^\| nodes \| clients \|.*\n(\|.*\n)+", text, re.MULTILINE).group().splitlines()
    return [dict(zip(cells(table[0]), map(number, cells(line)))) for line in table[2:]]


def plot_latency(rows):
    clients, nodes = (sorted({row[name] for row in rows}) for name in ("clients", "nodes"))
    found = {(row["nodes"], row["clients"]): row["median, ms"] for row in rows}
    series = {nodes_text(count): [found[count, it] for it in clients] for count in nodes}
    return bars("Median time of a run, ms; nodes, database and clients on two cores", [clients_text(it) for it in clients], series)


def plot_shares(rows):
    clients = max(row["clients"] for row in rows)
    rows = [row for row in rows if row["clients"] == clients]
    series = {name: [row[f"{name}, µs a run"] for row in rows] for name in ("nodes", "database")}
    return bars(f"Processor time of a run, µs; {clients_text(clients)}", [nodes_text(row["nodes"]) for row in rows], series)


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(text):
    return float(text.replace(",", ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    rows = nodes_table()
    plots = {"cost": plot_cost(), "nodes-latency": plot_latency(rows), "nodes-cost": plot_shares(rows)}
    for name, plot in plots.items():
        file = DOCS / f"plots/{name}.svg"
        if is_check and file.read_text() != plot:
            sys.exit(f"{file} is not that of its table: run benches/plots.py")
        if not is_check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(plot)


main()
