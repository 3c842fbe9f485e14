"""The small pictures of the lessons in the README: figures/gallery/NN_name.png.

python tools/gallery.py [FOLDER]    from the runs in FOLDER, by default figures/quick
"""

import sys
from pathlib import Path

from PIL import Image

GALLERY = Path(__file__).parents[1] / "figures" / "gallery"
WIDTH, COLORS = 420, 64  # pixels, twice as many as the README shows; of the palette
SHOWN = {
    "00_uncertainty_decomposition": "four_situations",
    "01_toy_regression_collapse": "ten_networks",
    "02_ensembles_of_ensembles": "chain_rule",
    "03_mlp_width_sweep": "width_and_groups",
    "04_mask_extraction": "pixels",
    "05_tile_extraction": "votes",
    "06_lora_ensemble": "updates",
    "07_intruder_dimensions": "equal_size",
    "08_singular_value_ensemble": "turned",
    "09_hydra_head_pruning": "removed",
    "10_head_similarity": "classes",
    "11_gradient_uncertainty": "classes",
    "12_sweep_results": "change",
    "13_scoreboard": "front",
    "14_zero_shot_hydra": "pictures",
    "15_sound_ensemble": "sounds",
    "16_bring_your_model": "inputs",
    "17_cheap_ensembles": "size",
}


def main(folder: str = "figures/quick") -> None:
    """Write one picture a lesson, on white and with few colours."""
    for lesson, name in SHOWN.items():
        picture = Image.open(Path(folder, lesson, f"{name}.png")).convert("RGBA")
        page = Image.new("RGBA", picture.size, "white")
        page.alpha_composite(picture)
        height = round(WIDTH * page.height / page.width)
        small = page.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
        small.quantize(COLORS).save(GALLERY / f"{lesson}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
