"""Ordinary models that must train under every precision: how many runs are refused?

Each run makes a small model with fresh weights, takes a few private steps with real noise through
the loop that everyone writes, and counts as refused if any check stops it. None may be.

    python benchmarks/honest_zoo.py --seeds 100
    python benchmarks/honest_zoo.py --seeds 5 --models bert vit --precisions bfloat16

Models whose libraries are not installed are left out. It ends with 1 if a run was refused, and
prints the first reason for each model and precision.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lap2.train import BookkeepingError, PrivacyEngine, UnsupportedModuleError

RECORDS, BATCH, STEPS = 48, 12, 5
VOCABULARY, LENGTH, CLASSES, PADDING = 60, 12, 3, 0
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
}

Batch = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its records, and the loss of each record."""

    model: Callable[[], nn.Module]
    records: Callable[[], Dataset]
    losses: Callable[[nn.Module, Batch], Tensor]


def texts() -> Dataset:
    """Tokens of different numbers, padded to one length, with a mask and a class."""
    ids = torch.randint(1, VOCABULARY, (RECORDS, LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (RECORDS, 1))
    return TensorDataset(ids * mask, mask.long(), torch.randint(CLASSES, (RECORDS,)))


def images() -> Dataset:
    """Pixels and a class."""
    return TensorDataset(torch.randn(RECORDS, 3, 16, 16), torch.randint(CLASSES, (RECORDS,)))


def of_class(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a text's class."""
    ids, mask, y = batch
    logits = model(input_ids=ids, attention_mask=mask).logits
    return F.cross_entropy(logits, y, reduction="none")


def of_smoothed_class(model: nn.Module, batch: Batch) -> Tensor:
    """The same with label smoothing and weights of classes, which are each record's own."""
    ids, mask, y = batch
    weight = torch.tensor([1.0, 3.0, 0.5])
    logits = model(ids, mask)
    return F.cross_entropy(logits, y, weight.to(logits), reduction="none", label_smoothing=0.1)


def of_next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Each text's own mean over its tokens."""
    ids, mask, _ = batch
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    counted = mask[:, 1:].to(each.dtype)
    return (each * counted).sum(1) / counted.sum(1)


def of_image(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of an image's class."""
    pixels, y = batch
    output = model(pixels)
    return F.cross_entropy(getattr(output, "logits", output), y, reduction="none")


def bert() -> nn.Module:
    """With its usual dropout."""
    import transformers  # noqa: PLC0415 - may be missing

    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))


def gpt2() -> nn.Module:
    """With tied embeddings and its usual dropout."""
    import transformers  # noqa: PLC0415 - may be missing

    settings = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, **tokens))


def vit() -> nn.Module:
    """A vision transformer with dropout."""
    import transformers  # noqa: PLC0415 - may be missing

    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    settings = {name: TEXT[name] for name in (*kept, "num_labels")}
    config = transformers.ViTConfig(
        **settings, image_size=16, patch_size=4, hidden_dropout_prob=0.1
    )
    return transformers.ViTForImageClassification(config)


def lora() -> nn.Module:
    """BERT with adapters that start, as they do, with a factor of zero."""
    import peft  # noqa: PLC0415 - may be missing

    config = peft.LoraConfig(
        r=4,
        lora_dropout=0.1,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )
    return peft.get_peft_model(bert(), config)


def timm_vit() -> nn.Module:
    """A vision transformer with stochastic depth and layer scale."""
    import timm  # noqa: PLC0415 - may be missing

    return timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=CLASSES,
        drop_path_rate=0.2, proj_drop_rate=0.1, init_values=0.1,
    )  # fmt: skip


def cnn() -> nn.Module:
    """Convolutions, group normalisation, pooling and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24 * 9, CLASSES),
    )  # fmt: skip


class Encoder(nn.Module):
    """Attention of torch's own over words and places, and a mean over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32, padding_idx=PADDING)
        self.places = nn.Embedding(LENGTH, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, CLASSES))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The scores of the classes."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = self.layers(x, src_key_padding_mask=mask == 0)
        counted = mask[:, :, None].to(x.dtype)
        return self.head((x * counted).sum(1) / counted.sum(1))


CASES: Mapping[str, Case] = {
    "bert": Case(bert, texts, of_class),
    "gpt2": Case(gpt2, texts, of_next_token),
    "vit": Case(vit, images, of_image),
    "lora": Case(lora, texts, of_class),
    "timm": Case(timm_vit, images, of_image),
    "cnn": Case(cnn, images, of_image),
    "encoder": Case(Encoder, texts, of_smoothed_class),
}


@dataclass
class Result:
    """What became of the runs of one model in one precision."""

    runs: int = 0
    refused: int = 0
    seconds: float = 0.0
    reason: str = ""


def train(case: Case, precision: torch.dtype | None, seed: int) -> PrivacyEngine:
    """A few private steps with fresh weights and data."""
    torch.manual_seed(seed)
    model = case.model().train()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        data_loader=DataLoader(case.records(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(math.ceil(STEPS / len(loader))):
        for batch in loader:
            casting = torch.autocast("cpu", precision) if precision else contextlib.nullcontext()
            optimizer.zero_grad()
            with casting:
                losses = case.losses(model, batch)
            engine.backward(losses)
            optimizer.step()
            if engine.accountant.steps == STEPS:
                break
    return engine


def measure(case: Case, precision: torch.dtype | None, seeds: int, first: int = 0) -> Result:
    """Train once for each seed."""
    result = Result()
    for seed in range(first, first + seeds):
        started = time.perf_counter()
        try:
            train(case, precision, seed)
        except (BookkeepingError, UnsupportedModuleError) as error:
            result.refused += 1
            result.reason = result.reason or f"seed {seed}: {error}"
        result.runs += 1
        result.seconds += time.perf_counter() - started
    return result


def importable(case: Case) -> bool:
    """Whether the library that a model comes from is installed and works."""
    try:
        case.model()
    except (ImportError, RuntimeError):
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a run was refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    refused, reasons = 0, []
    print(f"{'model':<10}{'precision':<12}{'runs':>6}{'refused':>9}{'s per run':>11}")
    for name in options.models:
        if not importable(CASES[name]):
            print(f"{name:<10}not installed")
            continue
        for precision in options.precisions:
            found = measure(CASES[name], PRECISIONS[precision], options.seeds, options.first)
            mean = found.seconds / max(1, found.runs)
            print(
                f"{name:<10}{precision:<12}{found.runs:>6}{found.refused:>9}{mean:>11.3f}",
                flush=True,
            )
            refused += found.refused
            if found.reason:
                reasons.append(f"{name}, {precision}, {found.reason}")
    print("\n".join(reasons))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
