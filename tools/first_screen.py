"""The picture on the first screen of README and book: an alarm that falls silent.

    python tools/first_screen.py    writes figures/gallery/first_screen.png

Ten narrow and ten wide networks learn the embedded digits. Below each of six pieces of
clothing stand the class probabilities of every network, the mutual information between
prediction and network, and the alarm. Its threshold is set on the narrow networks, so
that 95 % of the test digits stay below it, and is kept for the wide ones.
"""

from pathlib import Path

from matplotlib.axes import Axes
from torch import Tensor

from uqlab import data, ensembles, models, plots, training, uncertainty

PICTURE = Path(__file__).parents[1] / "figures" / "gallery" / "first_screen.png"
WIDTHS = {"ten narrow\nnetworks": 0.5, "ten wide\nnetworks": 8.0}
SHOWN = 6


def predict(width: float, *sets: data.Dataset) -> list[Tensor]:
    """Train ten networks of a width; return their logits [10, inputs, 10] on each set."""
    train = data.load("mnist-mini", "train")
    hidden = int(64 * width), int(32 * width)
    ensemble = ensembles.deep(lambda: models.mlp(784, hidden), members=10, seed=0)
    how = {"epochs": 20, "lr": 0.05, "momentum": 0.9, "seed": 0, "progress": False}
    training.fit(ensemble, train.inputs, train.labels, **how)
    return [training.predict(ensemble, items.inputs) for items in sets]


def middle_items(labels: Tensor, information: Tensor) -> list[int]:
    """Return, for each of the first kinds, the item of middle rank by information."""
    shown = []
    for kind in range(SHOWN):
        rows = (labels == kind).nonzero()[:, 0]
        order = rows[information[rows].argsort()]
        shown.append(order[len(order) // 2].item())
    return shown


def draw_probabilities(ax: Axes, probabilities: Tensor, mi: float, rings: bool) -> None:
    """Draw one row for each network and one column for each digit; write the alarm."""
    ax.pcolormesh(
        probabilities, cmap="Greys", vmin=0, vmax=1, edgecolors="white", linewidth=0.6
    )
    ax.invert_yaxis()
    ax.spines[:].set(visible=True, color=plots.NEUTRAL, linewidth=0.6)
    ax.set_xticks([i + 0.5 for i in range(10)], list("0123456789"), fontsize=6)
    ax.tick_params(length=0, pad=1)
    text = f"MI {mi:.2f}: " + ("alarm" if rings else "silent")
    color, weight = (plots.EPISTEMIC, "bold") if rings else (plots.TOTAL, "normal")
    ax.set_xlabel(text, fontsize=8, color=color, weight=weight, labelpad=2)


def draw(clothes: data.Dataset, logits: dict[str, list[Tensor]]) -> None:
    """Draw and save the picture; print how many digits and clothes trigger the alarm."""
    information = {
        name: [uncertainty.decompose(z).epistemic for z in by_set]
        for name, by_set in logits.items()
    }
    narrow = next(iter(WIDTHS))
    threshold = information[narrow][0].quantile(0.95)
    shown = middle_items(clothes.labels, information[narrow][1])
    plots.use_style()
    fig, axes = plots.figure(SHOWN, 1 + len(WIDTHS), height=1.15)
    for column, row in enumerate(shown):
        axes[0, column].imshow(clothes.inputs[row, 0], cmap="gray_r")
        axes[0, column].set(xticks=[], xlabel=clothes.classes[clothes.labels[row]])
        axes[0, column].spines[:].set_visible(False)
        for line, name in enumerate(WIDTHS, 1):
            mi = information[name][1][row]
            probabilities = logits[name][1][:, row].softmax(-1)
            rings = bool(mi > threshold)
            draw_probabilities(axes[line, column], probabilities, mi.item(), rings)
    for ax in axes.flat:
        ax.set(yticks=[], aspect="equal")
    for line, name in enumerate(["input", *WIDTHS]):
        axes[line, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    fig.savefig(PICTURE, facecolor="white", transparent=False)
    for name in WIDTHS:
        for where in (threshold, information[name][0].quantile(0.95)):  # kept, anew
            digits, items = [
                (mi > where).double().mean().item() for mi in information[name]
            ]
            share = f"{100 * digits:.2f} % of the digits, {100 * items:.1f} % of the clothes"
            print(f"{name!r}: above {where:.3f} are {share}")


def main() -> None:
    """Train both ensembles and draw them."""
    digits, clothes = data.load("mnist-mini"), data.load("fashion-mini")
    draw(clothes, {name: predict(w, digits, clothes) for name, w in WIDTHS.items()})


if __name__ == "__main__":
    main()
