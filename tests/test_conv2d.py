"""The 2-D codec: shapes, the nearest code, norms and attention against plain arithmetic."""

import pytest
import torch
from scd_pack.scd_core import operations
from scd_pack.scd_core.codecs.conv2d import (
    AttnBlock,
    ConvCodec,
    ConvCodecConfig,
    Downsample,
    ResBlock,
    SpatialNorm,
    Upsample,
)
from scd_tests.toys import initialise

SMALL = {
    "codes": 20, "code_dim": 5, "z_channels": 6, "ch": 8, "ch_mult": (1, 2, 2), "encoder_blocks": 1,
    "decoder_blocks": 2, "groups": 4,
}


def codec(**changes):
    return initialise(ConvCodec(ConvCodecConfig(**{**SMALL, **changes}), dtype=torch.float32))


def group_norm(x, layer):
    """[B,C,H,W] normalised over groups of channels, by hand."""
    b, c, h, w = x.shape
    y = x.reshape(b, layer.num_groups, -1)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    return y.view(b, c, h, w) * layer.weight[:, None, None] + layer.bias[:, None, None]


@pytest.mark.parametrize("mult", [(1,), (1, 2), (1, 2, 2)])
def test_shapes(mult, generator):
    net = codec(ch_mult=mult)
    f = 2 ** (len(mult) - 1)
    assert net.cfg.factor == f
    codes = net.encode(torch.rand(2, 8, 16, 3, generator=generator))
    assert codes.shape == (2, 8 // f, 16 // f) and codes.dtype == torch.int64
    assert int(codes.min()) >= 0 and int(codes.max()) < 20
    frames = net.decode(codes)
    assert frames.shape == (2, 8, 16, 3) and frames.dtype == torch.float32
    assert float(frames.min()) >= 0 and float(frames.max()) <= 1
    assert net.decode_raw(codes).shape == (2, 3, 8, 16)


@pytest.mark.parametrize("size", [(9, 16), (8, 18), (2, 2)])
def test_odd_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"picture of {size[1]}x{size[0]} does not divide into 4-pixel tokens"):
        codec().encode(torch.zeros(1, *size, 3))


@pytest.mark.parametrize("l2", [False, True])
def test_nearest_by_brute_force(l2, generator):
    net = codec(l2_codebook=l2)
    z = torch.randn(2, 5, 4, 6, generator=generator)
    book = net.quantize["embedding"].weight
    got = net.nearest(z)
    differ = 0
    for b in range(2):
        for i in range(4):
            for j in range(6):
                v, rows = z[b, :, i, j].double(), book.double()
                plain = int(((rows - v) ** 2).sum(1).argmin())
                unit = int(((rows / rows.norm(dim=1, keepdim=True) - v / v.norm()) ** 2).sum(1).argmin())
                assert int(got[b, i, j]) == (unit if l2 else plain)
                differ += unit != plain
    assert differ > 3  # the two rules do disagree here


@pytest.mark.parametrize("l2", [False, True])
def test_a_codebook_row_is_nearest_to_itself(l2):
    net = codec(l2_codebook=l2)
    codes = torch.arange(20).view(1, 4, 5)
    rows = net.quantize["embedding"](codes).permute(0, 3, 1, 2)
    assert torch.equal(net.nearest(rows), codes)
    assert torch.equal(net.nearest(7 * rows), codes) == l2  # only directions count, or lengths too


def test_unit_rows_are_what_the_decoder_sees():
    """With an l2 codebook, scaling its rows changes no picture."""
    for l2 in (True, False):
        net = codec(l2_codebook=l2)
        codes = torch.arange(20).view(1, 4, 5)
        before = net.decode_raw(codes)
        net.quantize["embedding"].weight.mul_(3)
        assert torch.allclose(net.decode_raw(codes), before, atol=1e-5) == l2


def test_range_of_the_codec():
    """Encode maps 0..1 into the codec's range, decode maps back and clamps."""
    codes = torch.arange(20).view(1, 4, 5)
    for low, high in ((-1.0, 1.0), (0.0, 1.0)):
        net = codec(range=(low, high))
        raw = net.decode_raw(codes).permute(0, 2, 3, 1)
        assert torch.allclose(net.decode(codes), ((raw - low) / (high - low)).clamp(0, 1), atol=1e-6)
        frames = torch.rand(1, 8, 8, 3, generator=torch.Generator().manual_seed(0))
        pictures = (frames * (high - low) + low).permute(0, 3, 1, 2)
        assert torch.equal(net.encode(frames), net.nearest(net.features(pictures)))


def test_spatial_norm_by_hand(generator):
    """Group norm, then scale and shift from the codes, each code covering its own square."""
    norm = initialise(SpatialNorm(8, 5, 4, operations))
    x, zq = torch.randn(2, 8, 4, 6, generator=generator), torch.randn(2, 5, 2, 3, generator=generator)
    wide = zq.repeat_interleave(2, 2).repeat_interleave(2, 3)
    scale, shift = (
        torch.einsum("oc,bchw->bohw", conv.weight[..., 0, 0], wide) + conv.bias[:, None, None]
        for conv in (norm.conv_y, norm.conv_b)
    )
    assert torch.allclose(norm(x, zq), group_norm(x, norm.norm_layer) * scale + shift, atol=1e-5)


def test_spatial_norm_is_in_every_norm_of_the_decoder():
    net = codec(spatial_norm=True)
    kinds = {type(m).__name__ for name, m in net.decoder.named_modules() if name.split(".")[-1].startswith("norm")}
    assert {"SpatialNorm", "GroupNorm"} >= kinds and "SpatialNorm" in kinds
    assert not any(isinstance(m, SpatialNorm) for m in net.encoder.modules())
    codes = torch.arange(20).view(1, 4, 5)
    a = net.decode_features(net.quantize["embedding"](codes).permute(0, 3, 1, 2))
    assert torch.allclose(a, net.decode_raw(codes), atol=1e-6)


def norm_of(channels):
    return operations.GroupNorm(4, channels, eps=1e-6)


def test_attention_by_hand(generator):
    block = initialise(AttnBlock(8, norm_of, operations))
    x = torch.randn(1, 8, 3, 4, generator=generator)
    y = group_norm(x, block.norm)[0].flatten(1)
    q, k, v = ((layer.weight[..., 0, 0] @ y + layer.bias[:, None]) for layer in (block.q, block.k, block.v))
    mixed = v @ (q.t() @ k / 8**0.5).softmax(1).t()
    out = block.proj_out.weight[..., 0, 0] @ mixed + block.proj_out.bias[:, None]
    assert torch.allclose(block(x)[0], x[0] + out.view(8, 3, 4), atol=1e-5)


def test_residual_block_by_hand(generator):
    block = initialise(ResBlock(8, 12, norm_of, operations))
    x = torch.randn(2, 8, 5, 4, generator=generator)
    conv = torch.nn.functional.conv2d
    h = group_norm(x, block.norm1)
    h = conv(h * h.sigmoid(), block.conv1.weight, block.conv1.bias, padding=1)
    h = group_norm(h, block.norm2)
    h = conv(h * h.sigmoid(), block.conv2.weight, block.conv2.bias, padding=1)
    want = h + conv(x, block.nin_shortcut.weight, block.nin_shortcut.bias)
    assert torch.allclose(block(x), want, atol=1e-4)
    assert not hasattr(ResBlock(8, 8, norm_of, operations), "nin_shortcut")


def test_resampling_by_hand(generator):
    """Down: pad right and below only, stride 2. Up: every cell doubled, then a convolution."""
    x = torch.randn(1, 4, 6, 4, generator=generator)
    down, up = initialise(Downsample(4, operations)), initialise(Upsample(4, operations))
    padded = torch.zeros(1, 4, 7, 5)
    padded[..., :6, :4] = x
    want = torch.nn.functional.conv2d(padded, down.conv.weight, down.conv.bias, stride=2)
    assert torch.allclose(down(x), want, atol=1e-6) and want.shape == (1, 4, 3, 2)
    wide = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(up(x), torch.nn.functional.conv2d(wide, up.conv.weight, up.conv.bias, padding=1), atol=1e-6)


def test_levels_count_from_the_highest_resolution():
    """Key names of public checkpoints: level 0 has the picture's resolution, in the encoder and the decoder alike."""
    net = codec(ch_mult=(1, 2, 4), attn_levels=(2,))
    keys = set(net.state_dict())
    sizes = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    for side, count in (("encoder.down", 1), ("decoder.up", 2)):
        for level, channels in enumerate((8, 16, 32)):
            for block in range(count):
                assert sizes[f"{side}.{level}.block.{block}.conv2.weight"] == (channels, channels, 3, 3)
            assert f"{side}.{level}.block.{count}.conv2.weight" not in keys
            has = {b for b in range(count) if f"{side}.{level}.attn.{b}.q.weight" in keys}
            assert has == (set(range(count)) if level == 2 else set())
    assert "encoder.down.1.downsample.conv.weight" in keys and "encoder.down.2.downsample.conv.weight" not in keys
    assert "decoder.up.1.upsample.conv.weight" in keys and "decoder.up.0.upsample.conv.weight" not in keys
    assert sizes["decoder.up.0.block.0.nin_shortcut.weight"][:2] == (8, 16)
    assert sizes["encoder.down.2.block.0.nin_shortcut.weight"][:2] == (32, 16)
    assert sizes["quantize.embedding.weight"] == (20, 5)
    assert sizes["quant_conv.weight"] == (5, 6, 1, 1) and sizes["post_quant_conv.weight"] == (6, 5, 1, 1)


def test_attention_takes_part(generator):
    """Levels named in the configuration have it after every block, and it changes the picture."""
    without, with_it = codec(), codec(attn_levels=(0, 1, 2))
    assert sum(isinstance(m, AttnBlock) for m in without.modules()) == 2  # one in each middle
    assert sum(isinstance(m, AttnBlock) for m in with_it.modules()) == 2 + 3 * 1 + 3 * 2
    codes = torch.arange(20).view(1, 4, 5)
    before = with_it.decode_raw(codes)
    for level in with_it.decoder.up:
        for attn in level.attn:
            attn.proj_out.weight.zero_()
            attn.proj_out.bias.zero_()
    assert not torch.allclose(with_it.decode_raw(codes), before, atol=1e-3)


def test_decoder_alone_and_no_post_quant():
    """A checkpoint may hold the decoder alone: it draws, and says in one sentence that it cannot read."""
    net = codec(encoder=False, post_quant=False, z_channels=5)
    assert not any(k.startswith(("encoder", "quant_conv", "post_quant")) for k in net.state_dict())
    assert net.decode(torch.arange(20).view(1, 4, 5)).shape == (1, 16, 20, 3)
    with pytest.raises(ValueError, match="has no encoder"):
        net.encode(torch.zeros(1, 16, 16, 3))


def test_pictures_of_a_batch_are_independent(generator):
    net = codec(spatial_norm=True, attn_levels=(2,))
    codes = torch.randint(0, 20, (3, 4, 4), generator=generator)
    assert torch.allclose(net.decode(codes)[1:2], net.decode(codes[1:2]), atol=1e-5)
    frames = torch.rand(3, 16, 16, 3, generator=generator)
    assert torch.equal(net.encode(frames)[1:2], net.encode(frames[1:2]))
