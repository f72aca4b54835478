"""Reference reader of replaced decoders in NumPy: the keys that a folder's sketches, buckets or learned hashes choose.

`docs/reference/replaced_folders.md` describes the files. This reader needs no other part of megasparse; it is quadratic
in the length, for tests of a server's implementation. It does not read layers whose heads use several mechanisms.

H heads, L length, D head dim, S sketches of G heads, d width of a sketch, K keys, M keys per bucket, P keys per page.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, the numbers."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8:start]), {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(content[first:end], DTYPES[entry["dtype"]])
            if entry["dtype"] == "BF16":
                values = (values.astype("<u4") << 16).view("<f4")
            tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
    return tensors


def visible_keys(folder: Path, layer: int, q: Any, k: Any, page: int = 1) -> Any:
    """Return the keys that each query of a text attends to, (H, L, L) bool. Raises ValueError for other layers.

    Args:
        folder: A replaced decoder with sketches of heads (`smart_bird`), buckets and sketches (`ranked`) or learned
            hashes (`lha`) in all heads of this layer.
        layer: Number of the layer.
        q, k: (H, L, D), as the model's attention receives them, after rotation; a key head once per query head.
        page: P > 1 chooses K/P pages of P keys; a page scores as the best of its keys beyond the window and
            the sinks. Only for `smart_bird`.
    """
    entry = json.loads((folder / "config.json").read_text())["megasparse_attention"]["attention"]
    kind = entry["pattern"][layer % len(entry["pattern"])]
    settings, name = entry.get(str(kind), {}), f"layers.{layer}.self_attn.megasparse.{kind}."
    readable = ("smart_bird", "ranked", "lha")[: 1 if page > 1 else 3]
    if kind not in readable or settings.get("sketch", "heads") != "heads" or {"draws", "random"} & {*settings.values()}:
        raise ValueError(f"layer {layer} has {kind} {settings}, not one of {readable} that chooses by heads' tensors")
    tensors = read_tensors(folder / "megasparse.safetensors")
    weights = {key.split(name)[1]: value for key, value in tensors.items() if name in key}
    position = np.arange(q.shape[1])
    query, key = position[:, None], position
    chunk, first = settings["chunk"], key < settings["sinks"]
    if kind != "lha":
        near = (query // chunk - key // chunk <= 1) & settings["local"] | first
        chosen = sketched(settings, weights, q, k, page, near)
    else:
        near = (query - key < chunk) & settings["local"] | first
        chosen = hashed(settings, weights, q, k)
    visible = (chosen | near) & (key <= query)
    return visible | ((key == query) & ~visible.any(-1, keepdims=True))


def sketched(settings: dict[str, Any], weights: dict[str, Any], q: Any, k: Any, page: int, near: Any) -> Any:
    """Return the K keys of each query with the largest products of sketches, or of their signs, rounded to multiples of
    1/256; ties go to the earlier key. With `ranked` only of the last M keys in each of the `probes` best buckets.
    """
    together, width, (heads, length, _) = settings["sketch_heads"], settings["sketch_dim"], q.shape
    sketches, buckets = [], []
    for side, x in (("query", q), ("key", k)):
        grouped = x.astype(np.float64).reshape(-1, together, *x.shape[1:]).transpose(0, 2, 1, 3)
        weight = weights[f"{side}.weight"].reshape(heads // together, width, -1)
        sketches.append(grouped.reshape(*grouped.shape[:2], -1) @ weight.transpose(0, 2, 1))  # (S, L, d)
        if side == "key":  # caches store it in the model's dtype
            sketches[-1] = sketches[-1].astype(x.dtype).astype(np.float64)
        if settings.get("sketch_signs"):  # folders of earlier versions lack it
            sketches[-1] = np.where(sketches[-1] >= 0, 1.0, -1.0)
        if "buckets" in settings:
            of_side = (weights[f"{side}_buckets.{part}"] for part in ("weight", "bias"))
            weight, bias = (x.reshape(len(weight), settings["buckets"], -1).transpose(0, 2, 1) for x in of_side)
            buckets.append(sketches[-1] @ weight + bias)  # (S, L, buckets)
    score = np.rint(sketches[0] @ sketches[1].transpose(0, 2, 1) * (256 * width**-0.5))
    score[:, np.arange(length)[:, None] < np.arange(length)] = -np.inf
    if buckets:
        probes = (-buckets[0]).argsort(axis=-1, kind="stable")[..., None, : settings["probes"]]
        same = buckets[1].argmax(-1)[:, None, :, None] == probes  # (S, L, L, P)
        members = [newest(same[..., probe], settings["members"]) for probe in range(settings["probes"])]
        score[~np.logical_or.reduce(members)] = -np.inf
    score[:, near & (page > 1)] = -np.inf
    score = np.pad(score, ((0, 0), (0, 0), (0, -length % page)), constant_values=-np.inf)
    score = score.reshape(*score.shape[:2], -1, page).max(-1)  # of pages
    best = (-score).argsort(axis=-1, kind="stable")[..., : settings["keys"] // page]
    chosen = np.zeros(score.shape, bool)
    np.put_along_axis(chosen, best, True, axis=-1)
    chosen &= score > -np.inf
    if buckets:  # a query without a key in its buckets reads its own
        chosen |= np.eye(length, dtype=bool) & ~chosen.any(-1, keepdims=True)
    return chosen.repeat(page, axis=-1)[..., :length].repeat(together, axis=0)


def newest(same: Any, count: int | None) -> Any:
    """Keep the last `count` keys at or before each query, or all of them: (H, L, L) bool."""
    same = same & np.tri(same.shape[-1], dtype=bool)
    return same & (same[..., ::-1].cumsum(-1)[..., ::-1] <= (count or same.shape[-1]))


def hashed(settings: dict[str, Any], weights: dict[str, Any], q: Any, k: Any) -> Any:
    """Return the last M keys at or before each query in its bucket, the argmax of H_Q(q); keys use H_K(k), or both
    use H_Q(q) + H_K(k) if `joint`.
    """
    scores = []
    for side, x in (("query", q), ("key", k)):
        names = (f"hash.{side}_{part}" for part in ("weight1", "bias1", "weight2", "bias2"))
        first, *rest = (weights[name] for name in names if name in weights)
        x = x.astype(np.float64) @ first
        if rest:
            bias, second, last = rest
            x = np.maximum(x + bias.reshape(len(q), 1, -1), 0) @ second + last.reshape(len(q), 1, -1)
        scores.append(x)
    if settings["joint"]:
        scores = [scores[0] + scores[1]] * 2
    queries, keys = (x.argmax(-1) for x in scores)
    same = (queries[:, :, None] == keys[:, None]) & (np.arange(q.shape[1]) >= settings["sinks"])
    return newest(same, settings["chunk"])
