"""Make one .safetensors file of a model folder.

    python tools/convert.py FOLDER OUT.safetensors [--dtype bf16|fp8]

It holds what drawing needs: language model, image tokenizer, text tokenizer and settings. Put it into
ComfyUI/models/ar_models and pick it in Load AR Model.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scd_core.convert import KINDS, convert
from scd_core.errors import UserError


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", help="folder or file of a supported model")
    parser.add_argument("out", metavar="OUT.safetensors")
    parser.add_argument(
        "--dtype", choices=KINDS, help="number format of the language model; without it, all numbers stay as stored"
    )
    args = parser.parse_args(argv)
    try:
        path = convert(args.folder, args.out, args.dtype)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size / 2**30:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
