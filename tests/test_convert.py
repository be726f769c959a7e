"""One-file forms: the same numbers as the folder they were made of, in less room, by the same road."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, save_safetensors, writer
from scd_pack.scd_core.checkpoint.scales import scale_down
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.golden import Fixture, Subject
from scd_pack.scd_core.models.load import BUNDLED, load_model, open_model
from scd_pack.scd_core.models.parts import Ref
from scd_pack.scd_core.verify import find_check, run_check, table, verify
from scd_tests.test_t5 import add_tokenizer, t5_folder

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "data" / "golden"
CODEC_FIXTURES = ("chameleon-tokenizer", "llamagen-vq-ds16", "movqgan", "cosmos-dv8x16x16")
NAMES = sorted(
    folder.name for folder in GOLDEN.iterdir() if folder.name not in CODEC_FIXTURES and (folder / "meta.json").is_file()
)
# Where a half-precision file or a computation in 8 bits is not the fixture's: what its numbers may differ by.
FP8_SHARE = 0.2  # mean difference of logits, in their standard deviations: a miniature has few numbers to average over


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The golden fixtures side by side, the text-to-image LlamaGens with an image tokenizer under its own name."""
    root = tmp_path_factory.mktemp("golden") / "a" / "b"
    shutil.copytree(GOLDEN, root)
    vq = root / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt"
    shutil.copy(vq, vq.with_name("vq_ds16_t2i.pt"))
    return root


@pytest.fixture
def one_file(folders, tmp_path):
    """Convert a fixture's model: the new fixture, far from all other files."""

    def make(name, kind=None):
        folder = tmp_path / "c" / "d" / f"{name}-{kind}"
        (folder / "model").mkdir(parents=True)
        for file in ("expected.safetensors", "meta.json"):
            shutil.copy(folders / name / file, folder)
        convert(folders / name / "model", folder / "model" / "one.safetensors", kind)
        return folder

    return make


def subject_of(folder):
    fixture = Fixture(folder)
    return Subject(fixture, {find_check(name).part for name in fixture.tensors} | {"codec"})


@pytest.mark.parametrize("name", NAMES)
def test_one_file_gives_the_folders_numbers(one_file, folders, name):
    folder = one_file(name)
    rows = verify(folder)
    assert all(row.ok for row in rows), table(rows)
    files, before = open_model(folder / "model" / "one.safetensors"), open_model(folders / name / "model")
    assert type(files.family) is type(before.family) and files.family.sizes == before.family.sizes
    assert files.family.defaults == before.family.defaults
    for part in ("decoder", "codec"):
        new, old = files.build(part).state_dict(), before.build(part).state_dict()
        assert new.keys() == old.keys() and all(torch.equal(new[key], old[key]) for key in old)
    assert {ref.source.files for ref in files.family.refs("codec").values()} == {files.source.files}


def whole(refs):
    """Each tensor of a part once and with all its rows."""
    return {replace(ref, rows=None, dims=None) for ref in refs.values()}


@pytest.mark.parametrize("name", NAMES)
def test_bf16_keeps_what_bf16_can_hold(one_file, folders, name):
    path = one_file(name, "bf16") / "model" / "one.safetensors"
    files, before = open_model(path), open_model(folders / name / "model")
    refs, old = files.family.refs("decoder"), before.family.refs("decoder")
    assert {ref.dtype for ref in refs.values()} == {torch.bfloat16}
    assert all(torch.equal(refs[key].read(), old[key].read().bfloat16()) for key in old)
    codec, had = files.family.refs("codec"), before.family.refs("codec")
    assert {key: ref.dtype for key, ref in codec.items()} == {key: ref.dtype for key, ref in had.items()}
    if name not in ("llamagen-t2i-jadohu", "mar"):  # whose weights need fp16 and fp32
        rows = verify(path.parents[1])
        assert all(row.ok for row in rows), table(rows)
    # every weight in its bytes, and beside them a header
    stored = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    assert stored == sum(ref.bytes for ref in whole(refs) | whole(codec))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mar"])  # refused: test_mar
def test_fp8_stays_near_and_draws(one_file, folders, name):
    folder = one_file(name, "fp8")
    subject, plain = subject_of(folder), subject_of(folders / name)
    source = subject.files.source
    refs = subject.family.refs("decoder")
    scaled = [key for key, ref in refs.items() if ref.scaled]
    matrices = 11 if subject.decoder.cfg.context_dim else 7  # q, k, v, o (twice with a text), gate, up, down
    assert len(scaled) == matrices * subject.decoder.cfg.layers
    assert all(source.stored(refs[key].key) == torch.float8_e4m3fn for key in scaled)
    assert {ref.dtype for ref in refs.values()} == {torch.bfloat16}
    old = plain.family.refs("decoder")
    for key in scaled:
        got, want = refs[key].read(torch.float32), old[key].read(torch.float32)
        assert (got - want).abs().max() <= want.abs().max() / 2**4 + 1e-6  # 3 bits behind the leading one
        assert (got - want).square().mean().sqrt() < 0.04 * want.square().mean().sqrt()
    codes = subject.fixture.tensors["codes"]
    got, want = subject.forced(codes).logits, plain.forced(codes).logits
    assert (got - want).abs().mean() < FP8_SHARE * want.std()
    size = subject.plan.width, subject.plan.height
    clip = subject.plan.frames > 1
    frames = subject.family.sizes[0].frames if clip else 1
    kept = torch.full((1, subject.plan.frames, *subject.grid), -1)
    kept[:, : int(clip)] = 1  # the models of clips go on from a first grid
    request = Request(method="seed-exact", seed=3, window=4, width=size[0], height=size[1], frames=frames)
    drawn = generate(subject.decoder, subject.family, subject.prompt, None, request, kept)
    assert 0 <= int(drawn.codes.min()) <= int(drawn.codes.max()) < subject.plan.vocab
    assert subject.codec.decode_clip(drawn.codes[0]).isfinite().all()


def test_fp8_weights_stay_in_8_bits_where_the_layers_multiply_them(one_file):
    """A host's layers have a scale_weight; ours, on the plain road, get weights that are multiplied already."""
    path = one_file("llamagen-c2i", "fp8") / "model" / "one.safetensors"
    files = open_model(path)

    class Scaled(torch.nn.Linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale_weight = torch.nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, x):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale_weight.to(x.dtype), bias)

    from scd_pack.scd_core import operations

    layers = type("Layers", (), {**vars(operations), "Linear": Scaled})
    kept = files.build("decoder", operations=layers, dtype=torch.float32, keep_fp8=True)
    plain = files.build("decoder", dtype=torch.float32)
    q = kept.layers[0].self_attn.q_proj
    assert q.weight.dtype == torch.float8_e4m3fn and float(q.scale_weight) != 1
    assert kept.lm_head.weight.dtype == torch.float32 and float(kept.lm_head.scale_weight) == 1
    assert files.scaled("decoder") and not files.scaled("codec")
    weight = q.weight.float() * q.scale_weight
    assert torch.allclose(weight, plain.layers[0].self_attn.q_proj.weight, rtol=1e-6)


def test_both_spellings_of_scales_and_scales_by_row_are_read(tmp_path):
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    small, scale = scale_down(weight)
    rows = torch.arange(1.0, 7.0)
    tensors = {
        "a.weight": small, "a.scale_weight": scale, "a.scale_input": torch.ones(()), "scaled_fp8": small.new_empty(0),
        "b.weight": small.clone(), "b.weight_scale": scale.reshape(1), "b.input_scale": torch.ones(1),
        "c.weight": small.clone(), "c.weight_scale": rows[:, None], "d.weight": weight, "d.weight_scale": scale,
    }  # fmt: skip
    source = Source.open(save_safetensors(tensors, tmp_path / "m.safetensors"))
    assert set(source.keys()) == {"a.weight", "b.weight", "c.weight", "d.weight", "d.weight_scale"}
    want = small.float() * scale
    for key in ("a.weight", "b.weight"):
        assert torch.equal(source.read(key, torch.float32), want) and source.scaled(key)
        assert source.dtype(key) == torch.bfloat16 and torch.equal(source.read(key), want.bfloat16())
    assert torch.equal(source.read("c.weight", torch.float32), small.float() * rows[:, None])
    assert not source.scaled("c.weight") and not source.scaled("d.weight")
    for key, scales in (("a.weight", scale), ("c.weight", rows[2:5, None])):
        cut = Ref(source, key, rows=(2, 5))
        assert torch.equal(cut.read(torch.float32), small[2:5].float() * scales)
    fp8, one = Ref(source, "b.weight", rows=(2, 5)).read_scaled()
    assert fp8.dtype == torch.float8_e4m3fn and one.shape == () and torch.equal(fp8.float() * one, want[2:5])


def test_extremes_of_matrices_survive_8_bits():
    tiny = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) * 1e-4
    for weight in (torch.zeros(3, 3), torch.full((2, 2), 1e30), torch.tensor([[1e-30, -1e-30]]), tiny):
        small, scale = scale_down(weight)
        back = small.float() * scale
        assert back.isfinite().all() and torch.allclose(back, weight, rtol=0.07, atol=float(weight.abs().max()) / 100)


def test_a_text_encoder_goes_along(folders, tmp_path):
    """Flan-T5 beside a text-to-image LlamaGen: the one file reads the same words by itself."""
    models = tmp_path / "a" / "b" / "LlamaGen"
    models.mkdir(parents=True)
    shutil.copy(folders / "llamagen-t2i" / "model" / "t2i_XL_stage1_64.pt", models)
    shutil.copy(folders / "llamagen-vq-ds16" / "model" / "vq_ds16_t2i.pt", models)
    folder, _ = t5_folder(models / "flan-t5-xl", whole=True)
    add_tokenizer(folder)
    before = open_model(models / "t2i_XL_stage1_64.pt")
    path = convert(models / "t2i_XL_stage1_64.pt", tmp_path / "c" / "d" / "e" / "one.safetensors")
    files = open_model(path)
    want, got = (f.family.text.encode("a red fox").features for f in (before, files))
    assert torch.equal(want, got) and want.abs().max() > 0
    kept = Source.open(path)._readers[path.name].keys()
    assert [key for key in kept if key.startswith("t5.encoder.")]
    assert not [key for key in kept if key.startswith("t5.decoder.")]


def test_converting_again_changes_nothing(one_file, tmp_path):
    for kind in (None, "fp8"):
        first = one_file("lumina-mgpt-hf", kind) / "model" / "one.safetensors"
        again = convert(first, tmp_path / "x" / "y" / f"{kind}.safetensors", kind)
        assert again.read_bytes() == first.read_bytes()
    back = convert(again, tmp_path / "x" / "y" / "back.safetensors", "bf16")
    assert not open_model(back).scaled("decoder")


def test_bundled_model_converts(tmp_path):
    path = convert(BUNDLED, tmp_path / "copy.safetensors", "fp8")
    model = load_model(path, "fp32")
    drawn = generate(model.decoder, model.family, model.family.text.encode("fox"), None, Request(seed=1))
    assert model.codec.decode(drawn.codes[0]).isfinite().all() and path.stat().st_size < BUNDLED.stat().st_size


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_only_what_drawing_needs_is_kept(one_file, folders):
    folder = one_file("janus-pro-original")
    kept = set(Source.open(folder / "model" / "one.safetensors").keys())
    had = set(Source.open(folders / "janus-pro-original" / "model").keys())
    assert kept < had and not [key for key in kept if key.startswith(("vision_model.", "aligner."))]


def test_nothing_is_overwritten(folders, tmp_path):
    target = tmp_path / "one.safetensors"
    target.write_bytes(b"mine")
    with pytest.raises(UserError, match="exists"):
        convert(folders / "janus-pro-hf" / "model", target)
    assert target.read_bytes() == b"mine"


def test_nothing_half_written_stays(folders, tmp_path, monkeypatch):
    written = []

    def fail(tensor, *rest):
        written.append(tensor)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        return real(tensor, *rest)

    real = writer._bytes
    monkeypatch.setattr(writer, "_bytes", fail)
    with pytest.raises(UserError, match="No space left"):
        convert(folders / "janus-pro-hf" / "model", tmp_path / "out" / "one.safetensors")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match=r"needs .* GB, the disk has 0.0 GB free"):
        convert(folders / "janus-pro-hf" / "model", tmp_path / "one.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_back_is_removed(folders, tmp_path, monkeypatch):
    family = type(open_model(folders / "janus-pro-hf" / "model").family)
    monkeypatch.setattr(family, "detect", staticmethod(lambda source: "model.vision_model" in str(list(source.keys()))))
    with pytest.raises(UserError, match="cannot be kept in one file"):
        convert(folders / "janus-pro-hf" / "model", tmp_path / "one.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("janus-pro-hf/model", "one.pt", "must end in .safetensors"),
        ("chameleon-tokenizer/model", "one.safetensors", "an image tokenizer and no language model"),
        ("nothing/model", "one.safetensors", "does not exist"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(folders, tmp_path, source, target, told):
    with pytest.raises(UserError, match=told) as caught:
        convert(folders / source, tmp_path / target)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_damaged_metadata_is_told(one_file, tmp_path):
    path = one_file("lumina-mgpt-hf") / "model" / "one.safetensors"
    source = Source.open(path)
    tensors = {key: source._readers[path.name].tensor(key) for key in source._readers[path.name].keys()}
    metadata = {**source.metadata, "parts": '{"vq": {"prefix": 3}}'}
    with pytest.raises(UserError, match="'parts'"):
        open_model(save_safetensors(tensors, tmp_path / "bad.safetensors", metadata))


def test_tool_from_a_shell(folders, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("convert_tool", ROOT / "tools" / "convert.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    model, out = str(folders / "anole-hf" / "model"), tmp_path / "anole.safetensors"
    assert tool.main([model, str(out), "--dtype", "bf16"]) == 0
    assert "GB" in capsys.readouterr().out and out.is_file()
    assert tool.main([model, str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    row = run_check(subject := subject_of(folders / "anole-hf"), "codes", find_check("codes"))
    assert row.ok and subject.family.title in open_model(out).family.title
