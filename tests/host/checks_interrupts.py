"""Checks inside the host: Cancel at any moment, and what the sampler hands on when it is told to keep it."""

import contextlib
import gc

import torch
from checks_common import drawn, graph, loaded, previews_whatever_they_take, ready, refused
from checks_continuous import mar, sampled
from checks_memory import unload_button

CLIP = {"frames": 4, "seed": 40, "window": 16, "tree_nodes": 0}  # nothing is left to be measured
SHORT = {**CLIP, "frames": 2}


def alive():
    """Bytes of all tensors that are alive."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


def files(inside):
    return {path for folder in ("output", "temp") for path in (inside.base / folder).rglob("*") if path.is_file()}


@contextlib.contextmanager
def pressed_in(inside, place, name, call):
    """Cancel is pressed when a method of a network or class is called for the `call`-th time.

    Yields a list of the calls that came after that one.
    """
    real, calls, after = getattr(place, name), [], []

    def method(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            inside.mm.interrupt_current_processing(True)
        elif len(calls) > call:
            after.append(1)
        return real(*args, **kwargs)

    setattr(place, name, method)
    try:
        yield after
    finally:
        if isinstance(place, type):
            setattr(place, name, real)
        else:
            delattr(place, name)
    assert len(calls) >= call, f"{name} was called {len(calls)} times"


def moments(inside, decoder, codec):
    """(moment, object, method, which call of it, calls that may follow, widgets of the sampler)."""
    writer = inside.module("scd_core.video.av_writer").AvWriter
    return (
        ("prefill", decoder.embed, "prompt", 1, 1, {}),
        ("while the window is measured", decoder.layers[0], "forward", 3, 0, {"window": 0, "tree_nodes": -1}),
        ("first pass", decoder.layers[1], "forward", 2, 0, {}),
        ("pass 5", decoder, "logits", 5, 0, {}),
        ("preview", codec, "decode", 1, 0, {"preview": "auto"}),
        ("decode", codec.decoder.conv_in, "forward", 1, 0, {}),
        ("writing", writer, "add", 1, 0, {}),
    )


def clip(inside, prompt):
    """Bytes of the clip that a run without disturbance writes; the file is removed again."""
    before, inside.executor = files(inside), inside.fresh_executor()
    inside.run(prompt)
    assert inside.outcome()[0] == "execution_success", inside.outcome()
    (new,) = files(inside) - before
    found = new.read_bytes()
    new.unlink()
    return found


def check_cancel_at_every_moment(inside):
    """It ends within a layer, pass, chunk or frame; no file and no tensor is left; the next run is as a fresh one."""
    module, wanted = inside.module("scd_core.window"), {}
    model, _, vq = loaded(inside)

    for moment, place, name, call, more, widgets in moments(inside, model.net, vq.net):
        prompt = graph(**{**SHORT, **widgets})
        if str(widgets) not in wanted:
            wanted[str(widgets)] = clip(inside, prompt)
        inside.executor = inside.fresh_executor()
        before, size = files(inside), alive()
        module._measured.clear()
        with previews_whatever_they_take(inside), pressed_in(inside, place, name, call) as after:
            inside.run(prompt)
        assert inside.outcome()[0] == "execution_interrupted", (moment, inside.outcome())
        assert len(after) <= more, (moment, len(after))
        assert files(inside) == before, moment
        inside.executor = inside.fresh_executor()
        assert alive() <= size + 1000, moment
        assert clip(inside, prompt) == wanted[str(widgets)], moment


def check_cancel_while_a_model_is_read(inside):
    """It ends between two tensors of codec or decoder; nothing of them stays, and the next run reads them whole."""
    weights, ref = inside.module("nodes.weights"), inside.module("scd_core.models.parts").Ref
    prompt, codec = graph(**SHORT), len(loaded(inside)[2].files.family.refs("codec"))
    want = clip(inside, prompt)
    for call in (codec // 2, codec + 20):
        unload_button(inside)
        before, size = files(inside), alive()
        assert not weights._codecs and not weights._decoders
        with pressed_in(inside, ref, "read", call) as after:
            inside.run(prompt)
        assert inside.outcome()[0] == "execution_interrupted", (call, inside.outcome())
        assert not after and files(inside) == before, call
        inside.executor = inside.fresh_executor()
        assert alive() <= size + 1000 and not weights._codecs and not weights._decoders, call
    assert clip(inside, prompt) == want


def check_cancel_while_pictures_are_read(inside):
    vq = loaded(inside)[2]
    pictures = torch.rand(9, 64, 64, 3)
    want = inside.call("SCD_VQEncode", vq=vq, image=pictures).args[0].codes
    layer = vq.net.encoder.conv_in
    with pressed_in(inside, layer, "forward", 1) as after, refused("", inside.mm.InterruptProcessingException):
        inside.call("SCD_VQEncode", vq=vq, image=pictures)
    assert not after
    assert (inside.call("SCD_VQEncode", vq=vq, image=pictures).args[0].codes == want).all()


def check_cancel_in_the_continuous_sampler_and_in_compare(inside):
    model, positive, _ = mar(inside)
    want = sampled(inside, model, positive)[0].codes
    for name in ("encode", "decode"):
        if hasattr(model.net, name):
            with pressed_in(inside, model.net, name, 2), refused("", inside.mm.InterruptProcessingException):
                sampled(inside, model, positive)
    assert torch.equal(sampled(inside, model, positive)[0].codes, want)
    model, positive, _ = ready(inside)
    with pressed_in(inside, model.net, "logits", 4) as after, refused("", inside.mm.InterruptProcessingException):
        inside.call("SCD_Compare", model=model, positive=positive, methods="sjd, seed-exact", width=32, height=32,
                    frames=2, window=16)
    assert not after


def check_keep_hands_on_what_there_is(inside):
    model, positive, vq = ready(inside)
    whole = drawn(inside, model, positive, **CLIP)[0].codes
    with pressed_in(inside, model.net, "logits", 12) as after:
        tokens, report, _ = drawn(inside, model, positive, on_cancel="keep", **CLIP)
    assert not after, "it ends within the pass"
    inside.mm.throw_exception_if_processing_interrupted()  # the button's press is used up
    frames = tokens.codes.shape[1]
    assert 1 <= frames < 4 and f"ends after {frames} of 4 frames" in report and "(stopped early)" in report
    decided = int(report.split("stopped at ")[1].split()[0])
    flat = whole.flatten()[: frames * 64]
    assert (tokens.codes.flatten()[:decided] == flat[:decided]).all() and int(tokens.codes.min()) >= 0
    assert inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0].shape == (frames, 32, 32, 3)
    assert (drawn(inside, model, positive, **CLIP)[0].codes == whole).all()
    # what was kept is a beginning that the sampler can go on from
    assert drawn(inside, model, positive, **{**CLIP, "kept": tokens})[0].codes.shape == whole.shape


def check_keep_in_a_graph_goes_on_to_the_file(inside):
    """One press ends the drawing, the rest of the graph runs; a second one would end that, too."""
    model, _, vq = loaded(inside)
    for place, name, call, widgets in ((model.net, "logits", 3, {}), (vq.net, "decode", 1, {"preview": "auto"})):
        before = files(inside)
        with previews_whatever_they_take(inside), pressed_in(inside, place, name, call):
            ran = inside.run(graph(on_cancel="keep", **{**CLIP, **widgets}))
        assert inside.outcome()[0] == "execution_success" and "save" in ran, inside.outcome()
        assert len(files(inside) - before) == 1
    with pressed_in(inside, vq.net.decoder.conv_in, "forward", 1):
        inside.run(graph(on_cancel="keep", **{**CLIP, "seed": 44}))
    assert inside.outcome()[0] == "execution_interrupted"


def check_keep_has_nothing_to_keep_before_the_first_pass(inside):
    model, positive, _ = ready(inside)
    with pressed_in(inside, model.net.embed, "prompt", 1), refused("", inside.mm.InterruptProcessingException):
        drawn(inside, model, positive, on_cancel="keep", **CLIP)
    with refused("on_cancel 'perhaps': choose one of discard, keep"):
        drawn(inside, model, positive, on_cancel="perhaps")


def check_keep_in_the_continuous_sampler(inside):
    model, positive, vq = mar(inside)
    whole = sampled(inside, model, positive, steps=16)[0].codes
    inside.on_progress = lambda value, total: value >= 5 and inside.mm.interrupt_current_processing(True)
    latents, report = sampled(inside, model, positive, steps=16, on_cancel="keep")
    inside.on_progress = None
    same = (latents.codes == whole).all(2)
    assert "stopped at 5 of 16 tokens" in report and int(same.sum()) == 5
    assert inside.call("SCD_VQDecode", tokens=latents, vq=vq).args[0].isfinite().all()
    assert torch.equal(sampled(inside, model, positive, steps=16)[0].codes, whole)


def check_many_cancelled_runs_take_no_more_memory_than_one(inside):
    model, positive, _ = ready(inside)
    drawn(inside, model, positive, frames=2)
    size = alive()
    for number in range(6):
        with pressed_in(inside, model.net, "logits", 1 + number * 7 % 6), refused(
                "", inside.mm.InterruptProcessingException):
            drawn(inside, model, positive, seed=number, method=("sjd", "seed-exact")[number % 2])
        assert alive() <= size + 1000
