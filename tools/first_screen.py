"""The picture on the first screen of README and book: an alarm that falls silent.

    python tools/first_screen.py    writes figures/gallery/first_screen.png

Ten narrow and ten wide networks learn the embedded digits. Six pieces of clothing are
shown with the digit that each network takes them for. The alarm is set so that 95 % of
the test digits pass it on the narrow networks, and stays where it is for the wide ones.
"""

from collections import Counter
from pathlib import Path

from matplotlib.axes import Axes
from torch import Tensor

from uqlab import data, ensembles, models, plots, training, uncertainty

PICTURE = Path(__file__).parents[1] / "figures" / "gallery" / "first_screen.png"
WIDTHS = {"ten narrow\nnetworks": 0.5, "ten wide\nnetworks": 8.0}
SHOWN = 6


def answers(width: float, *sets: data.Dataset) -> list[Tensor]:
    """Train ten networks of a width; return their logits [10, inputs, 10] on each set."""
    train = data.load("mnist-mini", "train")
    hidden = int(64 * width), int(32 * width)
    ensemble = ensembles.deep(lambda: models.mlp(784, hidden), members=10, seed=0)
    how = {"epochs": 20, "lr": 0.05, "momentum": 0.9, "seed": 0, "progress": False}
    training.fit(ensemble, train.inputs, train.labels, **how)
    return [training.predict(ensemble, items.inputs) for items in sets]


def write_answers(ax: Axes, votes: Tensor, information: float, rings: bool) -> None:
    """Write the digits that ten networks answer, most frequent first, and the alarm."""
    counts = Counter(votes.tolist()).most_common()
    said = " ".join(str(digit) for digit, count in counts for _ in range(count))
    color = plots.EPISTEMIC if rings else plots.NEUTRAL
    half = len(said) // 2
    ax.text(0.5, 0.72, said[:half], ha="center", va="center", fontsize=9)
    ax.text(0.5, 0.48, said[half + 1 :], ha="center", va="center", fontsize=9)
    state = f"{information:.2f} nats: " + ("alarm" if rings else "silent")
    weight = "bold" if rings else "normal"
    ax.text(0.5, 0.15, state, ha="center", fontsize=7, color=color, weight=weight)


def main() -> None:
    """Draw and save the picture, and print how many of all clothes ring."""
    digits, clothes = data.load("mnist-mini"), data.load("fashion-mini")
    found = {name: answers(width, digits, clothes) for name, width in WIDTHS.items()}
    information = {
        name: [uncertainty.decompose(z).epistemic for z in by_set]
        for name, by_set in found.items()
    }
    narrow = next(iter(WIDTHS))
    threshold = information[narrow][0].quantile(0.95)
    # One of each of the first six kinds, of middle rank among those that ring when narrow.
    shown = []
    for kind in range(SHOWN):
        rows = (clothes.labels == kind).nonzero()[:, 0]
        rings = rows[information[narrow][1][rows] > threshold]
        order = information[narrow][1][rings].argsort()
        shown.append(rings[order[len(order) // 2]].item())
    plots.use_style()
    fig, axes = plots.figure(SHOWN, 1 + len(WIDTHS), height=0.95)
    for column, row in enumerate(shown):
        axes[0, column].imshow(clothes.inputs[row, 0], cmap="gray_r")
        for line, name in enumerate(WIDTHS, 1):
            value = information[name][1][row]
            votes = found[name][1][:, row].argmax(-1)
            rings = bool(value > threshold)
            write_answers(axes[line, column], votes, value.item(), rings)
    for line, name in enumerate(["what they see", *WIDTHS]):
        axes[line, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    fig.savefig(PICTURE)
    for name in WIDTHS:
        share = (information[name][1] > threshold).double().mean().item()
        print(f"{name!r}: {100 * share:.0f} % of the clothes ring")


if __name__ == "__main__":
    main()
