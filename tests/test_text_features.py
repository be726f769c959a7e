"""Text features made elsewhere: which are read, which are refused, and that they draw what the model's own would."""

import shutil

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.family import Family
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.text_features import FeatureReader, features_prompt
from scd_tests.host.miniatures import place
from scd_tests.janus_models import GOLDEN

WIDTH = 5


class Reads(Family):
    name = "the reader"
    title = "Readers of features"
    reads = FeatureReader(WIDTH, 4, "make them with the right encoder")


class ReadsWords(Family):
    name = title = "Wordy"


def rows(count, seed=0):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_features_pass_as_they_are():
    features = rows(3)
    for given in (features, features[None], features.double()[None]):
        prompt = features_prompt(Reads(), given)
        assert torch.equal(prompt.features, features) and prompt.features.dtype == torch.float32
        assert not prompt.notes and prompt.text == ""
    given = rows(3).half()
    assert torch.equal(features_prompt(Reads(), given).features, given.float())


def test_padding_is_left_out_by_mask_or_by_zeros():
    features = torch.cat([rows(2), torch.zeros(3, WIDTH)])
    for given, mask in (
        (features, None),
        (features[None], torch.tensor([[1, 1, 0, 0, 0]])),
        (torch.cat([rows(2), rows(3, 1)]), torch.tensor([True, True, False, False, False])),
        (torch.cat([rows(3, 1), rows(2)]), torch.tensor([0, 0, 0, 1, 1])),
    ):
        assert torch.equal(features_prompt(Reads(), given, mask).features, rows(2))


def test_nothing_left_stands_for_the_unconditional():
    assert features_prompt(Reads(), torch.zeros(1, 7, WIDTH)).features is None
    assert features_prompt(Reads(), rows(2), torch.zeros(1, 2)).features is None


def test_what_is_not_read_is_noted():
    prompt = features_prompt(Reads(), rows(6), text="a fox")
    assert torch.equal(prompt.features, rows(6)[:4])
    assert len(prompt.notes) == 2
    assert "words in the text box were not read" in prompt.notes[0] and "last 2 were left out" in prompt.notes[1]
    assert not features_prompt(Reads(), rows(2), text="  ").notes


@pytest.mark.parametrize(
    ("features", "mask", "told"),
    [
        (torch.ones(1, 3, WIDTH + 1), None, "features 6 wide, the reader reads 5: make them with the right encoder"),
        (torch.ones(2, 3, WIDTH), None, r"shape \[2, 3, 5\], the reader reads one prompt \[1, tokens, 5\]"),
        (torch.ones(WIDTH), None, r"shape \[5\]"),
        (torch.full((1, 2, WIDTH), torch.nan), None, "not finite"),
        (torch.full((1, 2, WIDTH), torch.inf), None, "not finite"),
        (torch.ones(1, 3, WIDTH), torch.ones(1, 4), "3 tokens and an attention mask for 4"),
        (torch.ones(1, 3, WIDTH), torch.ones(2, 3), r"shape \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(features, mask, told):
    with pytest.raises(UserError, match=told) as caught:
        features_prompt(Reads(), features, mask)
    assert "\n" not in str(caught.value)


def test_families_of_words_refuse_by_name():
    with pytest.raises(UserError, match="Wordy reads words and no CONDITIONING: disconnect"):
        features_prompt(ReadsWords(), rows(3))


def test_features_draw_what_the_models_own_encoder_would(tmp_path):
    """With its T5 folder, and with that encoder's features from elsewhere and no folder: the same tokens."""
    models = tmp_path / "deep" / "models"
    place(models, ["LlamaGen-t2i-XL-512"])
    with_t5 = load_model(models / "LlamaGen-t2i-XL-512", "fp32")
    words = with_t5.family.text.encode("a bowl of ripe oranges")
    shutil.rmtree(models / "flan-t5-xl")
    alone = load_model(models / "LlamaGen-t2i-XL-512", "fp32")
    with pytest.raises(UserError, match=r"text encoder: MISSING.*or connect its text features"):
        alone.family.text.encode("a bowl")
    padded = torch.cat([words.features, torch.zeros(3, words.features.shape[1])])[None]
    prompt = features_prompt(alone.family, padded)
    request = Request(seed=5, window=4)
    drawn = [
        generate(model.decoder, model.family, p, negative, request).codes
        for model, p, negative in (
            (with_t5, words, None),
            (alone, prompt, None),
            (alone, prompt, features_prompt(alone.family, torch.zeros_like(padded))),
            (alone, prompt, features_prompt(alone.family, padded.flip(1))),
        )
    ]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[1], drawn[3])
    with pytest.raises(UserError, match="features 768 wide, LlamaGen text-to-image reads 24: it was trained on"):
        features_prompt(alone.family, torch.ones(1, 9, 768))


def test_every_family_but_text_to_image_refuses_them():
    for name in ("janus-pro-hf", "anole-hf"):
        family = load_model(GOLDEN / name / "model", "fp32").family
        with pytest.raises(UserError, match=f"{family.title} reads words"):
            features_prompt(family, torch.ones(1, 3, 24))
