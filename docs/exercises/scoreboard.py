"""Compare a student's parts with Manyheads' own: python docs/exercises/scoreboard.py my_parts.py"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments() -> dict[str, tuple[object, ...]]:
    """Random arguments for each part."""
    torch.manual_seed(1)
    r, lengths = torch.randn, torch.arange(5) + torch.tensor([[0], [2]])
    return {
        "causal_mask": (5,),
        "scaled_dot_product_attention": (r(2, 3, 5, 4), r(2, 3, 5, 4), r(2, 3, 5, 4)),
        "multi_head": (r(2, 5, 12), r(12, 36), 3),
        "cross_attention": (r(2, 3, 4, 6), r(2, 3, 5, 6), r(2, 3, 5, 6), lengths < 4),
        "token_embedding": (torch.arange(10).view(2, 5), r(10, 12)),
        "sinusoidal_positions": (7, 12),
        "rotary_positions": (r(2, 3, 5, 4),),
        "layer_norm": (r(2, 5, 12) * 3 + 1, 1e-5),
        "feed_forward": (r(2, 5, 12), r(24, 12), r(24), r(12, 24), r(12)),
        "residual": (r(2, 5, 12) * 3 + 1, torch.tanh),
        "learning_rate": (torch.tensor([1, 3000, 4000, 9000]), 512, 4000),
        "label_smoothing": (r(6, 9), torch.arange(6), 0.1),
    }


def results(student: ModuleType) -> dict[str, str]:
    """For each part: `right`, or what is wrong."""
    solutions, rows = load(Path(__file__).with_name("solutions.py")), {}
    for name, values in arguments().items():
        try:
            torch.testing.assert_close(
                getattr(student, name)(*values),
                getattr(solutions, name)(*values),
                rtol=1e-4,
                atol=1e-5,
            )
            rows[name] = "right"
        except NotImplementedError:
            rows[name] = "to do"
        except Exception as error:  # whatever a student's code raises belongs on the scoreboard
            rows[name] = f"wrong: {str(error).strip().splitlines()[0] if str(error) else error!r}"
    return rows


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("give the file with your parts: scoreboard.py my_parts.py")
    rows = results(load(Path(sys.argv[1])))
    for name, text in rows.items():
        print(f"{name:<30}{text}")
    print(f"{sum(text == 'right' for text in rows.values())} of {len(rows)}")


if __name__ == "__main__":
    main()
