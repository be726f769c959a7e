"""Checks inside the host: what its memory management does to our models, and what is left after a run."""

import gc
import weakref

import miniatures
import torch
from checks_common import drawn, encoded, graph, loaded, ready, refused, replaced
from checks_continuous import mar, sampled
from torch.utils._python_dispatch import TorchDispatchMode


def watched(inside, kept):
    """Every KV cache that is made from now on adds a weak reference to `kept`."""
    cache = inside.module("scd_core.models.kv_cache").KVCache
    real = cache.__init__

    def made(self, *args, **kwargs):
        real(self, *args, **kwargs)
        kept.append(weakref.ref(self.store))

    return replaced(cache, "__init__", made)


def unload_button(inside, free=True):
    """What the host does between two prompts after /free with unload_models and free_memory."""
    inside.mm.unload_all_models()
    if free:
        inside.executor.reset()
    gc.collect()
    inside.mm.cleanup_models_gc()
    inside.mm.soft_empty_cache()


def check_unload_button_frees_everything(inside):
    """Decoder, codec and all caches are gone; the next run reads the model again and gives the same file."""
    caches, nets = [], []
    with watched(inside, caches):
        inside.run(graph(seed=60))
        model, _, vq = loaded(inside)
        nets += [weakref.ref(net) for net in (model.net, vq.net, model.patcher, vq.patcher)]
        codes = drawn(inside, model, encoded(inside, loaded(inside)[1]), seed=61)[0].codes
        del model, vq
        gc.collect()
        assert caches and not any(ref() is not None for ref in caches), "a cache ends with its run"
        unload_button(inside)
        assert [ref() for ref in nets] == [None] * 4
        assert not inside.module("nodes.weights")._decoders
        inside.run(graph(seed=60))
    assert inside.outcome()[0] == "execution_success", inside.outcome()
    model, positive, _ = ready(inside)
    assert (drawn(inside, model, positive, seed=61)[0].codes == codes).all()


def check_a_model_that_is_still_wired_comes_back(inside):
    """Unload without emptying the cache: the nodes' outputs hold the weights, and the next run loads them again."""
    inside.run(graph(seed=62))
    unload_button(inside, free=False)
    ran = inside.run(graph(seed=63))
    assert "load" not in ran and inside.outcome()[0] == "execution_success", inside.outcome()


def check_a_mar_is_freed_too(inside):
    model, positive, vq = mar(inside)
    before = sampled(inside, model, positive)[0].codes
    nets = [weakref.ref(model.net), weakref.ref(vq.net)]
    del model, positive, vq
    unload_button(inside)
    assert [ref() for ref in nets] == [None, None]
    model, positive, _ = mar(inside)
    assert torch.equal(sampled(inside, model, positive)[0].codes, before)


def check_two_samplers_share_a_loader(inside):
    """In one graph: the model is loaded once, and each draws what it draws alone."""
    alone = []
    for seed in (70, 71):
        model, positive, _ = ready(inside)
        alone.append(drawn(inside, model, positive, seed=seed, method="sjd")[0].codes)
    prompt = graph(seed=70, method="sjd")
    prompt["again"] = {"class_type": "SCD_Sampler", "inputs": {**prompt["draw"]["inputs"], "seed": 71}}
    prompt["decode again"] = {"class_type": "SCD_VQDecode", "inputs": {"tokens": ["again", 0], "vq": ["load", 2]}}
    prompt["save again"] = {"class_type": "SCD_VideoCombine", "inputs": {
        **prompt["save"]["inputs"], "images": ["decode again", 0]}}
    weights, reads = inside.module("nodes.weights"), []
    real = weights.load
    inside.executor = inside.fresh_executor()
    made = []
    sampler = inside.module("nodes.sampler")
    generate = sampler.generate

    def spy(*args, **kwargs):
        made.append(generate(*args, **kwargs))
        return made[-1]

    with replaced(weights, "load", lambda *a: reads.append(1) or real(*a)), replaced(sampler, "generate", spy):
        inside.run(prompt)
    assert inside.outcome()[0] == "execution_success", inside.outcome()
    assert len(reads) == 1 and len(made) == 2
    assert {d.codes.numpy().tobytes() for d in made} == {codes.numpy().tobytes() for codes in alone}


class Away(TorchDispatchMode):
    """Stands for weights on another device: only copying may read them. Anything else would fail there.

    Attributes:
        used: names of the operations that read a weight as it lies.
    """

    MAY = ("_to_copy", "copy_", "clone", "detach", "empty_like", "alias", "view", "t", "transpose", "slice", "select",
           "_unsafe_view", "unsqueeze", "expand", "permute", "reshape", "split", "unbind", "to", "flatten")

    def __init__(self, weights):
        super().__init__()
        self.places = [(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]  # tensors of a file share a storage
        self.used = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in self.MAY:
            flat = torch.utils._pytree.tree_leaves((args, kwargs))
            tensors = [t for t in flat if isinstance(t, torch.Tensor)]
            if any(start <= t.data_ptr() < end for t in tensors for start, end in self.places):
                self.used.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def part_loaded(inside, patcher):
    """Load a model as the host does when half of it finds room; returns weights that stayed away.

    One device has to do here, where a cast is no copy: so the layers that were left away get a weight function that
    copies, and bare weights are copied by our own `cast_to`.
    """
    inside.mm.unload_all_models()
    net = patcher.model
    patcher.load(torch.device("cpu"), lowvram_model_memory=max(1, patcher.model_size() // 2))
    away = []
    for module in net.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "prev_comfy_cast_weights"):
            module.weight_function, module.bias_function = [torch.clone], [torch.clone]
            away += own
        elif own and not getattr(module, "comfy_patched_weights", False):
            away += own
    assert away, "everything found room"
    return away


def draws(inside, model, vq, text, sides=(0, 0)):
    """(tokens of a few passes, their pictures) of any model."""
    generate, family, device = inside.module("scd_core.generate"), model.family, model.patcher.load_device
    if family.continuous:
        prompt = inside.module("scd_core.prompt").Prompt("3")
        run = inside.module("scd_core.continuous.sampler")
        codes = run.sample(model.net, family, prompt, run.Settings(steps=4, diffusion_steps=3)).latents[:, None]
        return codes, vq.net.decode(codes[:, 0])
    size = family.size(*sides, 1) if any(sides) else family.sizes[0]
    plan = family.plan(size)
    kept = None
    if plan.given:
        kept = torch.full((1, plan.frames, plan.rows, plan.cols), -1)
        kept.flatten()[: plan.given] = 5
    request = generate.Request(width=size.width, height=size.height, frames=size.frames, window=4, nodes=0, seed=2)
    drawn = generate.generate(
        model.net, family, family.text.encode(text), request=request, kept=kept, device=device,
        callback=lambda progress: progress.passes == 3,
    )
    return drawn.codes, vq.net.decode_clip(drawn.codes[0])


def check_every_family_draws_while_half_of_it_is_away(inside):
    """The host keeps what finds no room elsewhere and hands it over layer by layer: same tokens, same pixels."""
    folder = inside.base / "models" / "ar_models"
    miniatures.place(folder)
    mar(inside)
    operations, network = inside.module("scd_core.operations"), inside.module("scd_core.continuous.mar")
    seen = set()
    for name in (*miniatures.MODELS, *miniatures.COSMOS, "mar/mar_base"):
        model, _, vq = loaded(inside, name)
        asked = model, vq, miniatures.TEXTS.get(name, "a bowl"), miniatures.SIZES.get(name, (0, 0))
        with torch.inference_mode():
            codes, pixels = draws(inside, *asked)
            away = part_loaded(inside, model.patcher) + part_loaded(inside, vq.patcher)
            copying = lambda weight, like: weight.to(device=like.device, dtype=like.dtype).clone()  # noqa: E731
            with replaced(operations, "cast_to", copying), replaced(network, "cast_to", copying), Away(away) as mode:
                again, same = draws(inside, *asked)
        assert not mode.used, (name, mode.used)
        assert torch.equal(codes, again) and torch.allclose(pixels, same, atol=1e-5), name
        seen.add(model.family.title)
        for patcher in (model.patcher, vq.patcher):
            patcher.detach()
    known = {family.title for family in inside.module("scd_core.models.families").FAMILIES}
    assert {title for title in known if "bundled" not in title} <= seen, known - seen


def check_out_of_memory_in_a_graph_tells_what_fits(inside):
    """The host takes the error for what it is and unloads; the same graph runs when there is room again."""
    model, _, _ = loaded(inside)
    calls, unloaded = [], []

    def short(hidden):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return type(model.net).logits(model.net, hidden)

    model.net.logits = short
    real = inside.mm.unload_all_models
    try:
        with replaced(inside.mm, "unload_all_models", lambda: unloaded.append(1) or real()):
            inside.run(graph(seed=80, batch_size=2))
    finally:
        del model.net.logits
    kind, told = inside.outcome()
    assert kind == "execution_error" and unloaded, told
    assert "not enough memory for batch 2 with window 16" in told["exception_message"]
    assert "try batch 1 with window 16 (about" in told["exception_message"], told["exception_message"]
    inside.run(graph(seed=80, batch_size=2))
    assert inside.outcome()[0] == "execution_success", inside.outcome()


def check_out_of_memory_in_the_continuous_sampler_tells_what_fits(inside):
    """In the middle of a run with a draft: the sentence is about this sampler's widgets; the next run is as ever."""
    model, positive, _ = mar(inside)
    draft = loaded(inside, "mar/mar_base", dtype="bf16")[0]
    asked = {"draft_model": draft, "mode": "prefix", "gamma": 4, "batch_size": 3}
    want, calls = sampled(inside, model, positive, **asked)[0].codes, []

    def short(*args):
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("no room")
        return type(model.net).noise(model.net, *args)

    model.net.noise = short
    told = "batch size 3, cfg 2.9 and a draft model .mode prefix, gamma 4.* try batch size 2 .about.* no draft model"
    try:
        with refused(told, torch.OutOfMemoryError):
            sampled(inside, model, positive, **asked)
    finally:
        del model.net.noise
    assert torch.equal(sampled(inside, model, positive, **asked)[0].codes, want)
    with replaced(inside.mm, "get_total_memory", lambda *_: 1 << 18), refused("smaller batch, cfg 1, a smaller gamma"):
        sampled(inside, model, positive, **{**asked, "batch_size": 64})
