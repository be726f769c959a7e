"""Which codebook tokens belong to: two image tokenizers of one family may agree in every shape and in no code."""

ROWS = 64  # that stand for a codebook
NEAR = 0.1  # relative distance; what remains of a codebook after half precision or 8 bits


def book_of(net):
    """Some rows of a codec's codebook, fp32 [N, D] on the CPU; None where codes have a meaning without one."""
    table = net.quantize["embedding"].weight if "quantize" in dict(net.named_children()) else None
    if table is None:
        return None
    return table.detach()[:: max(1, len(table) // ROWS)].float().cpu().clone()


def same_book(one, other):
    """Are these rows (of `book_of`, or None: nothing is known) of one codebook?"""
    if one is None or other is None:
        return True
    return one.shape == other.shape and float((one - other).norm()) <= NEAR * float(one.norm())
