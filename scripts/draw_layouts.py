# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/layouts.md from the code that they show: ``python3 scripts/draw_layouts.py``.

Who holds which token comes from ``verl.models.mcore.packing``, who sits where from megatron-core's own table of ranks.
A test draws the pictures again and compares, so a change of the split shows in them.
"""

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's, whatever the environment has installed

from verl.utils.environment import use_environment  # noqa: E402

use_environment("torch")

import torch  # noqa: E402

from verl.models.mcore.packing import alignment, make_layout, roll_left_within_sequences, zigzag_indices  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "_static"
RANK_COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc")
PADDING, PLAIN, LINE = "#e0e0e0", "#ffffff", "#333333"
LENGTHS, CP_SIZE = (7, 3), 2


class Picture:
    """An SVG under construction; ``width`` and ``height`` in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle with a thin border."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{LINE}" stroke-width="0.8"/>')

    def bar(self, x: float, y: float, height: float) -> None:
        """A thick vertical line."""
        self.parts.append(f'<path d="M{x:g} {y:g}v{height:g}" stroke="{LINE}" stroke-width="3"/>')

    def text(
        self, x: float, y: float, text: str, size: int = 13, anchor: str = "middle", fill: str = "#111111"
    ) -> None:
        """Text whose base line is at ``y``."""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self.parts.append(f"<text {place}>{escape(text)}</text>")

    def svg(self) -> str:
        """The whole file."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
        ground = f'<rect width="{self.width}" height="{self.height}" fill="{PLAIN}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self.parts, "</svg>"]) + "\n"


def token_names(lengths: Sequence[int]) -> list[str]:
    """``a0 a1 ... b0 ...``: a letter for the sequence, the position within it."""
    return [f"{'abcdefgh'[i]}{position}" for i, length in enumerate(lengths) for position in range(length)]


def zigzag_picture() -> str:
    """Two sequences of 7 and 3 tokens: value order, padded order, each rank's share with its labels."""
    lengths = torch.tensor(LENGTHS)
    names = token_names(LENGTHS)
    tokens = torch.arange(len(names))
    labels = roll_left_within_sequences(tokens, lengths)
    layouts = [make_layout(lengths, cp_size=CP_SIZE, cp_rank=rank) for rank in range(CP_SIZE)]
    owner = {slot: rank for rank, layout in enumerate(layouts) for slot in layout.local_index.tolist()}
    picture = Picture(780, 430, "Zigzag split of two packed sequences over two context-parallel ranks")
    left, cell, high = 150, 50, 32

    def row(y: int, ids: Sequence[int], fills: Sequence[str]) -> None:
        for place, (token, fill) in enumerate(zip(ids, fills, strict=True)):
            picture.box(left + place * cell, y, cell, high, fill)
            picture.text(left + (place + 0.5) * cell, y + 21, names[token] if token >= 0 else "pad")

    picture.text(10, 45, "value order", anchor="start")
    row(24, tokens.tolist(), [PLAIN] * len(names))
    padded = make_layout(lengths, cp_size=CP_SIZE).padded_lengths.tolist()
    slots = torch.full((sum(padded),), -1)
    slots[layouts[0].real_slots] = tokens
    picture.text(10, 125, "padded order,", anchor="start")
    picture.text(10, 142, f"multiple {alignment(1, CP_SIZE)}", anchor="start")
    row(112, slots.tolist(), [RANK_COLOURS[owner[slot]] for slot in range(len(slots))])
    start = 0
    for length in padded:
        chunk = length // (2 * CP_SIZE)
        for number in range(2 * CP_SIZE):
            middle = left + (start + (number + 0.5) * chunk) * cell
            picture.text(middle, 104, f"chunk {number}", size=11)
            picture.bar(left + (start + number * chunk) * cell, 110, high + 4)
        start += length
    picture.bar(left + start * cell, 110, high + 4)
    for rank, layout in enumerate(layouts):
        y = 200 + rank * 118
        held, count = layout.pack(tokens, fill=-1)[0].tolist(), int(layout.num_local_tokens)
        picture.text(10, y + 14, f"rank {rank} holds", anchor="start")
        picture.text(10, y + 31, f"{count} real tokens", anchor="start", size=12)
        row(y, held, [PADDING if token < 0 else RANK_COLOURS[rank] for token in held])
        picture.text(10, y + 60, "predicts", anchor="start", size=12)
        picture.text(10, y + 84, "position in sequence", anchor="start", size=12)
        targets = layout.pack(labels, fill=-1)[0].tolist()
        for place, (token, position) in enumerate(zip(targets, layout.position_ids[0].tolist(), strict=True)):
            middle = left + (place + 0.5) * cell
            picture.text(middle, y + 60, names[token] if token >= 0 else "-", size=12)
            picture.text(middle, y + 84, str(position), size=12)
    return picture.svg()


def balance_picture(length: int = 16, cp_size: int = CP_SIZE) -> str:
    """The query-key pairs of causal attention, coloured by the rank that computes them: contiguous and zigzag."""
    whole = torch.tensor([length])
    plain = [list(range(r * length // cp_size, (r + 1) * length // cp_size)) for r in range(cp_size)]
    zigzag = [zigzag_indices(whole, cp_size, rank).tolist() for rank in range(cp_size)]
    cell = 15
    picture = Picture(640, 345, "Work of causal attention for each context-parallel rank")
    for column, (title, shares) in enumerate((("contiguous halves", plain), ("zigzag, as here", zigzag))):
        left, top = 50 + column * 310, 40
        picture.text(left + length * cell / 2, 26, title)
        for rank, queries in enumerate(shares):
            for query in queries:
                for key in range(query + 1):
                    picture.box(left + key * cell, top + query * cell, cell, cell, RANK_COLOURS[rank])
            pairs = sum(query + 1 for query in queries)
            y = top + length * cell + 22 + rank * 20
            picture.box(left, y - 11, 12, 12, RANK_COLOURS[rank])
            picture.text(left + 20, y, f"rank {rank}: {pairs} query-key pairs", anchor="start")
    return picture.svg()


def rank_rows() -> dict[str, list[str]]:
    """What each of 8 ranks holds with tp 2, cp 2, dp 2 and experts over ep 2, etp 1, by megatron-core's own order."""
    from verl.utils.megatron import cpu_backend

    cpu_backend.install()
    from megatron.core.parallel_state import RankGenerator

    world, tp, cp, dp, ep = 8, 2, 2, 2, 2
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=1, cp=cp, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=1, ep=ep, dp=world // ep, pp=1, cp=1, order="tp-ep-dp-pp")

    def index(groups: list[list[int]]) -> list[int]:
        return [next(group.index(rank) for group in groups if rank in group) for rank in range(world)]

    tp_rank, cp_rank, dp_rank = (index(dense.get_ranks(kind)) for kind in ("tp", "cp", "dp"))
    ep_rank = index(expert.get_ranks("ep"))
    one_token_chunks = torch.tensor([2 * cp])
    chunks = [", ".join(map(str, zigzag_indices(one_token_chunks, cp, rank).tolist())) for rank in cp_rank]
    return {
        "rows of the batch (dp)": [f"half {rank}" for rank in dp_rank],
        "chunks of each row (cp)": chunks,
        "slice of each matrix (tp)": [f"half {rank}" for rank in tp_rank],
        "experts of 8 (ep)": ["0-3" if rank == 0 else "4-7" for rank in ep_rank],
    }


def ranks_picture() -> str:
    """A table of 8 ranks and what each holds."""
    picture = Picture(800, 215, "What each of 8 ranks holds with tp 2, cp 2, dp 2, ep 2")
    left, cell, high = 190, 75, 34
    for rank in range(8):
        picture.text(left + (rank + 0.5) * cell, 32, f"rank {rank}")
    for line, (label, values) in enumerate(rank_rows().items()):
        y = 46 + line * (high + 5)
        picture.text(10, y + 22, label, anchor="start")
        kinds = sorted(set(values))
        for rank, value in enumerate(values):
            picture.box(left + rank * cell, y, cell, high, RANK_COLOURS[kinds.index(value)])
            picture.text(left + (rank + 0.5) * cell, y + 22, value)
    return picture.svg()


PICTURES = {
    "layouts_zigzag.svg": zigzag_picture,
    "layouts_balance.svg": balance_picture,
    "layouts_ranks.svg": ranks_picture,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write every picture to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write (default: docs/_static)")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (out / name).write_text(draw(), encoding="utf-8")
        print(f"wrote {out / name}")


if __name__ == "__main__":
    main()
