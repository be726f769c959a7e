"""The T5 encoder against transformers, its tokenizers, and its way into a LlamaGen prompt."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.models.t5 import T5Text, read_t5

GOLDEN = Path(__file__).parent / "data" / "golden"
WORDS = ["<pad>", "</s>", "<unk>", "▁a", "▁red", "▁fox", "▁on", "▁snow", "▁"]
SIZES = {"vocab_size": 60, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 3, "num_heads": 4}


def t5_folder(folder, whole=False, **changes):
    """A random T5 as transformers writes it; (folder, the transformers module)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.T5Config(**{**SIZES, "feed_forward_proj": "gated-gelu", **changes}, decoder_start_token_id=0)
    model = (transformers.T5ForConditionalGeneration if whole else transformers.T5EncoderModel)(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if "norm" in name else 0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder, model.encoder if whole else model


def add_tokenizer(folder):
    """A tokenizer.json of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"whole": True},
        {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-2},
        {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20},
    ],
)
@torch.no_grad()
def test_encoder_equals_transformers(tmp_path, changes):
    folder, reference = t5_folder(tmp_path / "t5", **changes)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 150), generator=torch.Generator().manual_seed(1))
    want = reference(input_ids=ids).last_hidden_state
    found = read_t5(Source.open(folder))(ids)
    assert want.std() > 0.1 and (found - want).abs().max() < 2e-5


def test_wrong_files_are_told(tmp_path):
    folder, _ = t5_folder(tmp_path / "t5")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    cases = [
        ({"num_layers": 4}, "needed weights are missing"),
        ({"d_ff": 48}, "has the shape"),
        ({"feed_forward_proj": "gated-tanh"}, "activation"),
        ({"num_heads": None}, "lacks 'num_heads'"),
    ]
    for change, told in cases:
        changed = {k: v for k, v in {**settings, **change}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(UserError, match=told):
            read_t5(Source.open(folder))


def test_texts_are_cut_to_the_slots_of_the_model(tmp_path):
    folder, reference = t5_folder(tmp_path / "t5")
    add_tokenizer(folder)
    text = T5Text(Source.open(folder), 6, None)
    assert text.ids("  A red\n fox ") == ([3, 4, 5, 1], 0)
    prompt = text.encode("a red fox on snow")
    assert prompt.features.shape == (6, SIZES["d_model"]) and not prompt.notes
    ids = torch.tensor([[3, 4, 5, 6, 7, 1]])
    with torch.no_grad():
        assert (prompt.features - reference(input_ids=ids).last_hidden_state[0]).abs().max() < 2e-5
    assert "the last 2 were left out" in text.encode("a red fox on a red snow").notes[0]
    assert text.encode(" ").features is None


def test_spiece_serves_without_tokenizer_json(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder, _ = t5_folder(tmp_path / "t5")
    with pytest.raises(UserError, match=r"tokenizer.json or spiece.model"):
        T5Text(Source.open(folder), 6, None).ids("a fox")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a red fox on snow\nsnow on a fox\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "spiece"), vocab_size=16, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    ids, left_out = T5Text(Source.open(folder), 40, None).ids("A red fox")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    assert (ids, left_out) == ([*pieces.encode("a red fox"), 1], 0)
    (folder / "spiece.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="no tokenizer file"):
        T5Text(Source.open(folder), 40, None).ids("a fox")


@pytest.mark.parametrize("place", ["LlamaGen/flan-t5-xl", "flan-t5-xl"])
def test_from_words_to_codes(tmp_path, place):
    """A text-to-image model finds its encoder in its own folder or beside it, and draws what the text asks for."""
    models = tmp_path / "deep" / "models"
    (models / "LlamaGen").mkdir(parents=True)
    shutil.copy(GOLDEN / "llamagen-t2i" / "model" / "t2i_XL_stage1_64.pt", models / "LlamaGen")
    shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", models / "LlamaGen" / "vq_ds16_t2i.pt")
    folder, _ = t5_folder(models / place)
    add_tokenizer(folder)
    model = load_model(models / "LlamaGen" / "t2i_XL_stage1_64.pt", "fp32")
    encode, codes = model.family.text.encode, []
    fox = "a red fox"
    for text, negative in ((fox, None), ("snow", None), (fox, encode("snow")), (fox, encode(""))):
        drawn = generate(model.decoder, model.family, encode(text), negative, Request(temperature=0, window=4))
        codes.append(drawn.codes)
    assert torch.equal(codes[0], codes[3])
    assert not any(torch.equal(codes[0], other) for other in codes[1:3])


def test_features_of_another_width_are_refused_at_load(tmp_path):
    folder = tmp_path / "deep" / "models"
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN / "llamagen-t2i" / "model" / "t2i_XL_stage1_64.pt", folder)
    shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", folder / "vq_ds16_t2i.pt")
    t5_folder(folder / "flan-t5-xl", d_model=32)
    with pytest.raises(UserError, match="features 32 wide, the model reads 24"):
        load_model(folder / "t2i_XL_stage1_64.pt")
