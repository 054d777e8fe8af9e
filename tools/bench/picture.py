#!/usr/bin/env python3
"""Draws what tools/bench/run measured on several ranks: the speed and memory of
each ZeRO stage and of its peers, one bar each. The SVG follows the reader's
light or dark theme.

  tools/bench/picture.py [--dtype fp32|bf16] RESULTS.json OUT.svg
"""

import argparse
import json
import sys
from xml.sax.saxutils import escape

sys.dont_write_bytecode = True

from common import replace, summary
from ranks import STAGES, TURNS, label

ROW, GAP, TOP, BOTTOM = 21, 12, 64, 34  # heights
NAMES, BARS, NUMBERS, MARGIN = 188, 250, 56, 20  # widths
# (heading, which bar is better, the number that a bar shows, its format)
PANELS = (("tokens per second", ": longer is better",
           lambda one: one["tokens_per_second"], "%.0f"),
          ("peak memory per rank, GB", ": shorter is better",
           lambda one: one["peak_rss_bytes"] / 1e9, "%.2f"))
STYLE = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif;
           fill: #1f2328 }
    .head { font-weight: 600 } .soft { font-weight: 400; fill: #59636e }
    .zero { fill: #1a7f4b } .peer { fill: #afb8c1 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .soft { fill: #9198a1 }
      .zero { fill: #3fb97a } .peer { fill: #545d68 } }
"""


def rows_of(turns):
    """{stage: [(name, kind, summary)]}, ours first, as far as measured."""
    found = {stage: [] for stage in STAGES}
    for kind, stage in TURNS:
        name = label(kind, stage)
        if name in turns:
            found[stage].append((name, kind, summary(turns[name])))
    return {stage: rows for stage, rows in found.items() if rows}


def text(x, y, words, kind="", end=False):
    return '  <text x="%g" y="%g"%s%s>%s</text>' % (
        x, y, ' class="%s"' % kind if kind else "",
        ' text-anchor="end"' if end else "", escape(words))


def draw(title, note, stages):
    """The SVG, as text."""
    parts, y = [], TOP
    panel = BARS + NUMBERS + MARGIN
    width = MARGIN + NAMES + 2 * panel
    everything = [one for rows in stages.values() for _, _, one in rows]
    most = [max(value(one) for one in everything)
            for _, _, value, _ in PANELS]
    for number, (head, better, _, _) in enumerate(PANELS):
        x = MARGIN + NAMES + number * panel
        parts.append('  <text x="%g" y="%g" class="head">%s<tspan '
                     'class="soft">%s</tspan></text>' % (x, TOP - 14, head,
                                                         better))
    for rows in stages.values():
        for name, kind, one in rows:
            ours = "zero" if kind == "zero" else "peer"
            parts.append(text(MARGIN + NAMES - 10, y + 14, name,
                              "head" if kind == "zero" else "", end=True))
            for number, (_, _, value, how) in enumerate(PANELS):
                x = MARGIN + NAMES + number * panel
                length = BARS * value(one) / most[number]
                parts += ['  <rect class="%s" x="%g" y="%g" width="%.1f" '
                          'height="%g" rx="2"/>' % (ours, x, y + 2, length,
                                                    ROW - 5),
                          text(x + length + 6, y + 14, how % value(one))]
            y += ROW
        y += GAP
    height = y - GAP + BOTTOM
    return "\n".join(
        ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" '
         'viewBox="0 0 %d %d" role="img">' % (width, height, width, height),
         "  <title>%s</title>" % escape(title),
         "  <style>%s  </style>" % STYLE, text(MARGIN, 24, title, "head"),
         *parts, text(MARGIN, height - 12, note, "soft"), "</svg>", ""])


def picture(results, dtype):
    """Of results.json. Errors: ValueError if it has no ranks."""
    turns = results.get("ranks", {}).get(dtype, {}).get("turns", {})
    stages = rows_of(turns)
    if not stages:
        raise ValueError("no %s steps on several ranks: tools/bench/run --only "
                         "ranks" % dtype)
    ours = next(rounds for name, rounds in turns.items()
                if name.startswith("zero"))[0]
    title = ("Training GPT-2 124M in %s on a CPU: %d ranks, each with one core "
             "and %d sequences of %d tokens" % (
                 dtype, ours["ranks"], ours["micro_batch"],
                 ours["sequence_length"]))
    return draw(title, "%s; measured by tools/bench/run --only ranks" %
                ours.get("device", "this machine"), stages)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("results", help="OUT/bench/results.json")
    parser.add_argument("svg")
    args = parser.parse_args()
    with open(args.results) as file:
        results = json.load(file)
    try:
        replace(args.svg, picture(results, args.dtype))
    except ValueError as error:
        sys.exit("tools/bench/picture.py: %s: %s" % (args.results, error))


if __name__ == "__main__":
    main()
