"""Heads of CLIP as a whole: addresses, and the identities of one tower for two."""

import pytest
import torch
from head_networks import HEADS, clip_model, inputs, two_towers
from same import near, unchanged
from test_circuits import algorithm_1

from uqlab import heads, models, training

EVERY = [("text", i, h) for i in range(3) for h in range(HEADS)] + [
    ("vision", i, h) for i in range(2) for h in range(HEADS)
]
SETS = {
    "text": [("text", 0, 3), ("text", 2, 1)],
    "vision": [("vision", 1, 0), ("vision", 0, 2)],
    "both": [("vision", 0, 1), ("text", 1, 1), ("vision", 1, 3), ("text", 0, 0)],
    "a whole layer of each": [
        (tower, 1, h) for tower in ("text", "vision") for h in range(HEADS)
    ],
}
EACH = pytest.mark.parametrize("gone", SETS.values(), ids=SETS)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return two_towers()


def logits(model, x):
    with torch.no_grad():
        return model(x)


def task(count=30):
    x, ood = inputs(count=count, seed=5), inputs(count=count // 2, seed=6)
    return (
        x,
        torch.randint(4, (count,), generator=torch.Generator().manual_seed(2)),
        ood,
    )


# Addresses ------------------------------------------------------------------------------------------------------------
def test_the_text_tower_comes_first(network):
    assert heads.shape(network) == (5, HEADS)
    assert heads.towers(network) == {"text": range(3), "vision": range(3, 5)}
    small = heads.prune(network, SETS["both"])
    assert heads.count_heads(small) == [3, 3, 4, 3, 3]
    assert heads.towers(network.vision) == {"": range(2)}  # a tower alone has pairs
    assert heads.count_heads(heads.prune(network.vision, [(1, 0)])) == [4, 3]


# Identities -----------------------------------------------------------------------------------------------------------
@EACH
def test_pruned_is_ablated(network, gone):
    x = inputs()
    with unchanged(network):
        whole, pruned = logits(network, x), logits(heads.prune(network, gone), x)
        with heads.ablate(network, gone):
            near(pruned, logits(network, x))
    assert (pruned - whole).abs().max() > 0.001


def test_the_whole_model_of_transformers_is_pruned_alike(network):
    torch.manual_seed(0)
    x, clip = inputs(), clip_model()
    assert heads.towers(clip) == heads.towers(network)
    named = {"input_ids": network.prompts, "pixel_values": x}
    near(logits(network, x), clip(**named).logits_per_image.detach())
    small = heads.prune(clip, SETS["both"])(**named).logits_per_image.detach()
    near(logits(heads.prune(network, SETS["both"]), x), small)


def test_the_order_of_algorithm_1(network):
    x, y, ood = task()
    expected, _ = algorithm_1(network, x, y, ood, "avg", 3, EVERY)
    found = heads.greedy_circuit(network, x, y, ood, budget=3, progress=False)
    assert found == expected
    with pytest.raises(ValueError, match=r"must be a list of \(tower, layer, head\)"):
        heads.prune(network, [(0, 1)])


def test_taylor_scores_of_both_towers(network):
    x, y, _ = task()
    scores = heads.taylor_scores(network, x, y)
    assert scores.shape == (5, HEADS)
    assert scores.min() > 0
    vision = heads.taylor_heads(network, x, y, [0, 0, 0, 2, 2])
    assert len(vision) == 4
    assert {tower for tower, _, _ in vision} == {"vision"}
    lowest = scores[3].argsort()[:2].tolist()
    assert vision[:2] == [("vision", 0, head) for head in lowest]
    every = heads.taylor_heads(network, x, y, 20, scope="model")
    assert every[0] == EVERY[scores.flatten().argmin()]
    assert set(every) == set(EVERY)


@pytest.mark.parametrize(
    "sets", [[SETS["text"], SETS["vision"]], [SETS["both"], []]], ids=["even", "ragged"]
)
def test_fused_is_separate(network, sets):
    members, x = [heads.prune(network, gone) for gone in sets], inputs()
    members[1].scale.data += 0.5
    fused = heads.fuse(members)
    apart = torch.stack([logits(member, x) for member in members])
    near(logits(fused, x), apart)
    near(training.predict(fused.float(), x.float(), batch_size=2), apart.float())
    near(logits(fused.shard(slice(1, 2)), x.float()), apart[1:].float())
    near(logits(fused.member(1), x.float()), apart[1].float())
    assert isinstance(fused.member(0), models.ZeroShot)


def test_members_with_other_prompts_do_not_fuse(network):
    with pytest.raises(ValueError, match="differ in their buffers"):
        heads.fuse([network, network.prompted(network.prompts[:2])])


def test_a_text_tower_has_no_class_token(network):
    features = heads.head_features(network, inputs())
    assert [each.shape for each in features] == [(5, HEADS, 4)] * len(
        heads.towers(network)["vision"]
    )
