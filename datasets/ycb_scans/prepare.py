"""Scan meshes of objects from random sides and pack the partial point clouds into one .npz for data=ycb_scans.

    python datasets/ycb_scans/prepare.py <folder of object folders> ycb_partial512.npz

Every object folder holds one mesh (``--mesh``, a Wavefront .obj in metres). A view turns the object any way, draws
points on its surface by area, keeps those that no other point hides along the third axis, and adds noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CLASSES = (
    "Banana",
    "CrackerBox",
    "FoamBrick",
    "GelatinBox",
    "MasterChefCan",
    "MustardBottle",
    "PottedMeatCan",
    "PowerDrill",
    "Scissors",
    "TomatoSoupCan",
)
STEP_MM = 0.25  # of the stored whole numbers
DRAWN = 100_000  # points on the surface before hidden ones are dropped: so many that no cell lacks its front


def read_mesh(path: Path) -> np.ndarray:
    """Triangles of a Wavefront file, in its unit. Shape: ``(T, 3 corners, 3)``."""
    corners: list[list[float]] = []
    faces: list[list[int]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, *rest = line.split() or [""]
        if kind == "v":
            corners.append([float(value) for value in rest[:3]])
        elif kind == "f":
            index = [int(entry.split("/")[0]) for entry in rest]
            index = [i - 1 if i > 0 else len(corners) + i for i in index]
            faces += [[index[0], index[i], index[i + 1]] for i in range(1, len(index) - 1)]
    if not faces:
        raise SystemExit(f"{path}: no faces in this file; expected a Wavefront .obj mesh")
    return np.array(corners)[np.array(faces)]


def rotation(rng: np.random.Generator) -> np.ndarray:
    """A rotation, uniform over all of them, from a normalised quaternion. Shape: ``(3, 3)``."""
    w, x, y, z = (q := rng.normal(size=4)) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def surface(triangles: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Points on a surface, by area. Shape: ``(T, 3, 3)`` to ``(count, 3)``."""
    first, second = triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]
    area = np.linalg.norm(np.cross(first, second), axis=1)
    chosen = rng.choice(len(triangles), size=count, p=area / area.sum())
    u, v = rng.random((2, count, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    return triangles[chosen, 0] + u * first[chosen] + v * second[chosen]


def visible(points: np.ndarray, cell: float, tolerance: float) -> np.ndarray:
    """Which points a viewer far up the third axis sees. Shape: ``(N, 3)`` to ``(N,)``."""
    place = np.floor(points[:, :2] / cell).astype(np.int64)
    place -= place.min(0)
    column = place[:, 0] * (place[:, 1].max() + 1) + place[:, 1]
    top = np.full(column.max() + 1, -np.inf)
    np.maximum.at(top, column, points[:, 2])
    return points[:, 2] >= top[column] - tolerance


def scan(triangles: np.ndarray, turn: np.ndarray, points: int, rng: np.random.Generator) -> np.ndarray:
    """One partial cloud in metres, about the middle of the whole object. Shape: ``(points, 3)``."""
    turned = triangles @ turn.T
    middle = (turned.min((0, 1)) + turned.max((0, 1))) / 2
    drawn = surface(turned - middle, DRAWN, rng)
    seen = drawn[visible(drawn, cell=0.004, tolerance=0.005)]
    seen = seen[rng.choice(len(seen), size=points, replace=len(seen) < points)]
    return seen + rng.normal(scale=0.0007, size=seen.shape)


def pack(folder: Path, out: Path, *, mesh: str, classes: Sequence[str], views: int, points: int, seed: int) -> None:
    """Write the file: of the views of each object the last quarter tests."""
    rng = np.random.default_rng(seed)
    clouds, labels, split, turns = [], [], [], []
    for label, name in enumerate(classes):
        found = sorted((folder / name).rglob(mesh)) if (folder / name).is_dir() else []
        if not found:
            raise SystemExit(f"{folder / name}: no {mesh} in it; --classes and --mesh say what is looked for")
        triangles = read_mesh(found[0])
        for view in range(views):
            turn = rotation(rng)
            clouds.append(scan(triangles, turn, points, rng))
            labels.append(label)
            split.append(int(view >= views - views // 4))
            turns.append(turn)
    np.savez_compressed(
        out,
        points_mm=np.round(np.array(clouds) * 1000 / STEP_MM).astype(np.int16),
        scale=np.float32(STEP_MM),
        label=np.array(labels, dtype=np.int8),
        split=np.array(split, dtype=np.uint8),
        rotation=np.array(turns, dtype=np.float16),
        classes=np.array(classes),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds one folder per object")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument(
        "--mesh", default="textured_simple_reoriented.obj", help="name of the mesh (default: %(default)s)"
    )
    parser.add_argument(
        "--classes", nargs="+", default=list(CLASSES), help="object folders (default: the ten of the card)"
    )
    parser.add_argument("--views", type=int, default=120, help="views of each object (default: %(default)s)")
    parser.add_argument("--points", type=int, default=512, help="points of a view (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    pack(**vars(options))
    print(
        f"{options.out}: {len(options.classes) * options.views} clouds of {len(options.classes)} objects, "
        f"{options.out.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
