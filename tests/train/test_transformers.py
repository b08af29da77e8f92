"""Transformers as they come: their clipped sums against a loop over the examples."""

import copy
import math

import peft
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lap2.train import (
    BookkeepingError,
    PrivacyEngine,
    Recorder,
    UnsupportedModuleError,
    gradients,
)
from lap2.train.arena import Arena
from lap2.train.coverage import coverage
from lap2.train.gradients import Outer, Rows, Tied, summed

from ..helpers import NoNoise, clipped, norms, weighted_sum

BATCH, LENGTH, VOCABULARY, WIDTH = 5, 7, 40, 16
CLIP = 0.3

SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT = SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
IMAGE = SMALL | {"image_size": 8, "patch_size": 4}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_loop(model, batch, losses):
    """Sum of clipped per-example gradients, one example after the other."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(BATCH):
        one = {name: value[i : i + 1] for name, value in batch.items()}
        grads = torch.autograd.grad(
            losses(model, one).sum(), list(params.values()), allow_unused=True
        )
        found = {name: g for name, g in zip(params, grads, strict=True) if g is not None}
        norm = torch.sqrt(sum(g.square().sum() for g in found.values()))
        for name, grad in found.items():
            total[name] += grad * (CLIP / norm).clamp(max=1.0)
    return total


def assert_equal(found, expected, tolerance):
    scale = max(value.norm() for value in expected.values())
    for name, value in expected.items():
        difference = (found.get(name, 0 * value) - value).norm()
        assert difference <= tolerance * (value.norm() + 1e-2 * scale), name


def agree(model, batch, losses):
    """Float64 to 1e-10 and float32 to 1e-4, compared with autograd or not, and when trained."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model = model.to(dtype)
        data = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        expected = by_loop(copy.deepcopy(model), data, losses)
        modes = [True, False, False]
        recorder = Recorder(model, iter(modes).__next__)
        for _ in modes:
            losses(model, data).sum().backward()
            assert_equal(clipped(recorder, CLIP), expected, tolerance)
        recorder.remove()
    assert sum(float(value.norm()) > 0 for value in expected.values()) > 0.8 * len(expected)
    engine = trains(model := copy.deepcopy(model), data, losses)
    found = {name: BATCH * p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert_equal(found, expected, tolerance)
    # What shows nothing in a rehearsal has nothing to show here.
    assert engine._step.rehearsal.open_names == not_used(expected)
    assert not engine._step.unchecked


def trains(model, data, losses, *, seen=lambda _piece: None):
    """One step of all records without noise, after the rehearsals; ``seen`` is told of each."""
    engine = PrivacyEngine(sampler=NoNoise())
    trained = [p for p in model.parameters() if p.requires_grad]
    records = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        data_loader=DataLoader(records, len(records)),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        release="values",
    )
    rehearsed = 0
    for batch in loader:
        engine.backward(losses(model, batch))
        optimizer.step()
        seen(loader.piece)
        rehearsed += not loader.ends_batch
    assert (engine.accountant.steps, rehearsed >= 4) == (1, True)
    return engine


def not_used(expected):
    return {name for name, value in expected.items() if not value.any()}


def tokens(**more):
    torch.manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 4:], ids[1, 4:] = 0, 1
    ids[2, 3] = ids[2, 1]  # a word that comes twice
    return {"input_ids": ids, "attention_mask": mask, **more}


def images():
    torch.manual_seed(4)
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8), "y": torch.arange(BATCH) % 3}


def labelled():
    return tokens(y=torch.arange(BATCH) % 3)


def of_class(model, batch):
    inputs = {k: v for k, v in batch.items() if k != "y"}
    return F.cross_entropy(model(**inputs).logits, batch["y"], reduction="none")


def of_next_token(model, batch):
    """Each example's own mean over its tokens."""
    logits = model(**batch).logits[:, :-1].transpose(1, 2)
    counted = batch["attention_mask"][:, 1:]
    each = F.cross_entropy(logits, batch["input_ids"][:, 1:], reduction="none")
    return (each * counted).sum(1) / counted.sum(1)


def of_image(model, batch):
    return F.cross_entropy(model(batch["pixel_values"]), batch["y"], reduction="none")


def of_squares(model, batch):
    output = model(**batch)
    output = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    return output.square().flatten(1).sum(1)


def bert(**more):
    config = transformers.BertConfig(**TEXT | {"num_labels": 3} | more)
    return transformers.BertForSequenceClassification(config)


def roberta():
    config = transformers.RobertaConfig(**TEXT, num_labels=3, type_vocab_size=1)
    return transformers.RobertaForSequenceClassification(config)


def gpt2(**more):
    settings = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 16}
    settings |= {"bos_token_id": 0, "eos_token_id": 0} | more
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, num_labels=3))


def dinov2():
    config = transformers.Dinov2Config(**IMAGE, num_labels=3, layerscale_value=0.5)
    return transformers.Dinov2ForImageClassification(config)


def masked_bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


MODELS = {
    "bert": (bert, labelled, of_class),
    "bert, tied": (masked_bert, tokens, of_next_token),
    "roberta": (roberta, labelled, of_class),
    "gpt2, tied": (gpt2, tokens, of_next_token),
    "vit": (vit, images, of_class),
    "dinov2": (dinov2, images, of_class),
}


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models_run_as_they_are(name):
    torch.manual_seed(1)
    make, data, losses = MODELS[name]
    model = make().train()
    assert {entry.how for entry in coverage(model).entries} <= {"book-keeping", "copies"}
    agree(model, data(), losses)


LORA = {
    "bert": {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]},
    "gpt2, tied": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "vit": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "bert, words": {"target_modules": ["word_embeddings", "query"]},
}


@pytest.mark.parametrize("name", LORA)
def test_lora(name):
    torch.manual_seed(1)
    make, data, losses = MODELS[name.removesuffix(", words")]
    config = peft.LoraConfig(r=2, **LORA[name], init_lora_weights=False)
    agree(peft.get_peft_model(make(), config).train(), data(), losses)


@pytest.mark.parametrize("name", LORA)
def test_lora_as_it_starts(name):
    """The second factor is zero, so that the first one shows nothing before the second step."""
    torch.manual_seed(1)
    make, data, losses = MODELS[name.removesuffix(", words")]
    model = peft.get_peft_model(make(), peft.LoraConfig(r=2, **LORA[name])).train()
    engine = PrivacyEngine()
    records = [dict(zip(data(), row, strict=True)) for row in zip(*data().values(), strict=True)]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(records, BATCH),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
    )
    # An embedding's factors change places: the zero one is looked up.
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    silent = {n for n in trained if "lora_A" in n} | {n for n in trained if "embedding_B" in n}
    for unchecked in (silent, set()):
        for batch in loader:
            engine.backward(losses(model, batch))
            optimizer.step()
        assert engine._step.rehearsal.open_names == unchecked
        assert not engine._step.unchecked
    assert engine.accountant.steps == 2
    assert engine.statement(1e-5).is_guarantee


@pytest.mark.parametrize("name", MODELS)
def test_training_biases_alone_keeps_no_inputs(name):
    torch.manual_seed(1)
    make, data, losses = MODELS[name]
    model = make().train()
    for key, param in model.named_parameters():
        param.requires_grad_(key.endswith("bias"))
    agree(model, data(), losses)
    recorder = Recorder(model)
    losses(
        model, {k: v.float() if v.is_floating_point() else v for k, v in data().items()}
    ).sum().backward()
    assert all(record.grad is None and not record.inputs for record in recorder._records)


def test_timm_vision_transformer(timm):
    torch.manual_seed(1)
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
    for more in ({}, {"reg_tokens": 2, "init_values": 0.3}, {"no_embed_class": True}):
        model = timm.models.VisionTransformer(**settings, **more, num_classes=3).train()
        assert {e.how for e in coverage(model).entries} == {"book-keeping", "copies"}
        agree(model, images(), of_image)
    config = peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    agree(peft.get_peft_model(model, config), images(), of_image)


class Encoder(nn.Module):
    def __init__(self, **more):
        super().__init__()
        settings = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True, **more}
        layer = nn.TransformerEncoderLayer(WIDTH, 2, **settings)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, mask=None):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layers(x, mask=causal if mask is None else None, src_key_padding_mask=mask)


class Decoder(nn.Module):
    """Attends to something else, with keys and values of another width or the same."""

    def __init__(self, **more):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **more)

    def forward(self, x, y, z):
        mixed, weights = self.attention(x, y, value=z, average_attn_weights=False)
        return mixed.flatten(1).sum(1, keepdim=True) + weights.square().flatten(1)


def sequence(width=WIDTH, length=LENGTH, seed=5):
    return torch.randn(BATCH, length, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (Encoder, {"x": sequence()}),
        (
            Encoder,
            {"x": sequence(), "mask": torch.arange(LENGTH)[None] > torch.arange(2, 7)[:, None]},
        ),
        (lambda: Encoder(norm_first=True, bias=False), {"x": sequence()}),
        (Decoder, {"x": sequence(), "y": sequence(length=4), "z": sequence(length=4, seed=6)}),
        (
            lambda: Decoder(kdim=6, vdim=5),
            {"x": sequence(), "y": sequence(6, 4), "z": sequence(5, 4)},
        ),
    ],
)
def test_torch_attention(make, batch):
    torch.manual_seed(1)
    model = make().train()
    plain = copy.deepcopy(model)
    recorder = Recorder(model)
    torch.testing.assert_close(model(**batch), plain(**batch))  # the same function, written out
    model.eval(), plain.eval()
    torch.testing.assert_close(model(**batch), plain(**batch))
    recorder.remove()
    assert "forward" not in vars(
        next(m for m in model.modules() if type(m) is nn.MultiheadAttention)
    )
    agree(model.train(), batch, of_squares)


def enable_checkpointing(model, settings=None):
    """Under the name that this version of transformers has for it."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)(settings)


@pytest.mark.parametrize("where", ["hugging face", "torch"])
def test_gradient_checkpointing_counts_every_layer_once(where):
    torch.manual_seed(1)
    if where == "hugging face":
        plain, data, losses = gpt2().train(), tokens(), of_next_token
        model = copy.deepcopy(plain)
        enable_checkpointing(model)
    else:

        class Checkpointed(Encoder):
            def forward(self, x):
                for layer in self.layers.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                return x

        model, data, losses = Checkpointed().train(), {"x": sequence()}, of_squares
    agree(model, data, losses)


def test_reentrant_checkpointing_is_refused():
    for rehearses in (False, True):
        model = bert().train()
        recorder = Recorder(model, lambda: rehearses)  # noqa: B023 - called at once
        of_class(model, labelled()).sum().backward()
        recorder.collect(loss_reduction="sum")
        enable_checkpointing(model, {"use_reentrant": True})
        with pytest.raises(BookkeepingError, match="use_reentrant=False"):
            of_class(model, labelled()).sum().backward()
        recorder.remove()


def test_dropout_is_recorded_with_the_mask_that_was_drawn():
    """Any weighted sum of the recorded gradients is autograd's, for the same masks."""
    torch.manual_seed(1)
    model = bert(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).double().train()
    plain, weights = copy.deepcopy(model), torch.rand(BATCH).double()
    recorder = Recorder(model)
    for seed in range(2):
        torch.manual_seed(seed)
        of_class(model, labelled()).sum().backward()
        torch.manual_seed(seed)
        plain.zero_grad()
        (weights * of_class(plain, labelled())).sum().backward()
        expected = dict(plain.named_parameters())
        for gradient in recorder.collect(loss_reduction="sum").gradients:
            found = weighted_sum(gradient, weights)
            torch.testing.assert_close(found, expected[recorder.names[gradient.param]].grad)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_rehearsals_draw_the_same_for_a_record_and_ordinary_batches_do_not(checkpointed):
    """And so gradients can be compared in spite of dropout."""
    torch.manual_seed(1)
    model = gpt2(resid_pdrop=0.3, attn_pdrop=0.2).train()
    if checkpointed:
        enable_checkpointing(model, {"use_reentrant": False})
    data, seen, drawn = tokens(), {}, []

    def losses(model, batch):
        found = of_next_token(model, batch)
        drawn.append(found.detach())
        return found

    engine = trains(model, data, losses, seen=lambda piece: seen.update({piece: drawn[-1]}))
    settles, *rehearsed, ordinary = seen.items()
    assert not settles[0].rehearsal.numbers  # who only looks at it finds ordinary draws
    kinds = [piece.rehearsal.kind for piece, _ in rehearsed]
    assert set(kinds) == {"first", "again", "replaced", "without"}
    first = rehearsed[kinds.index("first")][1]
    for piece, found in rehearsed:
        rows = [(i, record) for i, record in enumerate(piece.rehearsal.records) if record >= 0]
        here, there = zip(*rows, strict=True)
        torch.testing.assert_close(found[list(here)], first[list(there)])
    assert ordinary[0].rehearsal is None
    with torch.no_grad():
        again = [of_next_token(model, data) for _ in range(2)]
    assert engine.accountant.steps == 1
    assert not torch.equal(*again)


def with_own_loss(model, data, *, clip=CLIP):
    """A step with the loss that the model computes itself, a mean over its batch."""
    engine = PrivacyEngine(sampler=NoNoise())
    trained = [p for p in model.parameters() if p.requires_grad]
    records = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        data_loader=DataLoader(records, len(records)),
        noise_multiplier=1.0,
        max_grad_norm=clip,
        release="values",
    )
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
    return engine


def test_the_models_own_loss_is_rehearsed_too():
    torch.manual_seed(1)
    model, data = vit().train(), images()
    expected = by_loop(copy.deepcopy(model), data, of_class)
    data["labels"] = data.pop("y")
    engine = with_own_loss(model, data)
    assert_equal({n: BATCH * p.grad for n, p in model.named_parameters()}, expected, 1e-4)
    assert engine._step.rehearsal.open_names == not_used(expected)
    assert any("was a mean" in sentence for sentence in engine.statement(1e-5).assumptions)


@pytest.mark.parametrize("clip", [CLIP, 100.0])
def test_the_models_own_loss_is_refused_if_it_mixes_examples(clip):
    """Also where every gradient is so long that clipping hides how long it is."""
    torch.manual_seed(1)
    data = tokens()
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    with pytest.raises(UnsupportedModuleError, match="different numbers of them"):
        with_own_loss(gpt2().train(), {**data, "labels": labels})
    even = with_own_loss(gpt2().train(), {**data, "labels": data["input_ids"]})
    assert even.accountant.steps == 1  # as many for each: a mean of means

    class Renamed(nn.Module):
        """Calls the labels something else, so that nobody knows them for what they are."""

        def __init__(self):
            super().__init__()
            self.inner = gpt2()

        def forward(self, ids, mask, wanted):
            logits = self.inner(input_ids=ids, attention_mask=mask).logits[:, :-1].mT
            loss = F.cross_entropy(logits, wanted[:, 1:])
            return transformers.modeling_outputs.CausalLMOutput(loss=loss)

    data = {"ids": data["input_ids"], "mask": data["attention_mask"], "wanted": labels}
    with pytest.raises(BookkeepingError, match=r"mean over tokens|over the whole batch"):
        with_own_loss(Renamed().train(), data, clip=clip)


def test_the_models_own_loss_is_rehearsed_behind_a_frozen_head():
    """The gradient reaches every adapter through the residual stream, with none in between."""
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = peft.get_peft_model(gpt2(), config).train()
    engine = with_own_loss(model, {**tokens(), "labels": tokens()["input_ids"]})
    assert not engine._step.rehearsal.open_names


class Positions(nn.Module):
    """Positions that have no batch dimension, as in many small language models."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.gain = nn.Linear(1, WIDTH)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        gains = self.gain(torch.linspace(0, 1, length, dtype=self.gain.weight.dtype)[None, :, None])
        return self.words(input_ids) * gains + self.places(torch.arange(length))


def test_what_is_looked_up_once_for_all_examples_has_a_gradient_for_each():
    torch.manual_seed(1)
    ids = tokens()["input_ids"]
    agree(Positions().train(), {"input_ids": ids}, of_squares)
    model = Positions().double().train()
    plain, recorder = copy.deepcopy(model), Recorder(model)
    for length in (LENGTH, BATCH):  # the second time, there are as many positions as examples
        batch = {"input_ids": ids[:, :length]}
        expected = by_loop(plain, batch, of_squares)
        of_squares(model, batch).sum().backward()
        assert_equal(clipped(recorder, CLIP), expected, 1e-10)
    recorder.remove()


def test_the_first_batch_may_have_as_many_examples_as_positions():
    """By itself this could not be told apart, but the rehearsals before it have other sizes."""
    ids = tokens()["input_ids"][:, :BATCH]
    for _ in range(3):
        model = Positions().double().train()
        expected = by_loop(copy.deepcopy(model), {"input_ids": ids}, of_squares)
        trains(model, {"input_ids": ids}, of_squares)
        found = {name: BATCH * p.grad for name, p in model.named_parameters()}
        assert_equal(found, expected, 1e-5)


class Mixes(nn.Module):
    """Its recorded gradients add up, but not to what each example contributed."""

    def __init__(self, how):
        super().__init__()
        self.how, self.token = how, nn.Parameter(torch.randn(1, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.how == "centres the batch":
            x = self.layer(x)
            return x - x.mean(0)
        if self.how == "turns the batch":
            return self.layer(x.roll(1, 0)).roll(-1, 0)
        return self.layer(x) + self.token.mean(0)


class WithLoss(nn.Module):
    def __init__(self, inner, *, last=None):
        super().__init__()
        self.inner, self.last = inner, last or nn.Identity()

    def forward(self, x):
        return self.last(self.inner(x)).square().sum()


MIXING = ["centres the batch", "turns the batch", "averages the copies"]


@pytest.mark.parametrize("how", MIXING)
@pytest.mark.parametrize("loss", ["outside", "inside", "inside, at once"])
def test_gradients_of_the_wrong_example_are_found(how, loss):
    torch.manual_seed(1)
    model = Mixes(how)
    if loss != "outside":
        model = WithLoss(model, last=nn.Linear(WIDTH, WIDTH) if loss == "inside" else None)
    with pytest.raises(BookkeepingError, match="examples are mixed"):
        spoilt(model.train(), torch.randn(40, WIDTH))


def spoilt(model, x, *, rehearse=True, factor=1.0, passes=1):
    """The engine after training on x; losses are multiplied with a factor in rehearsals."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), len(x)),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        loss_reduction="sum",
        rehearse=rehearse,
    )
    for _ in range(passes):
        for (batch,) in loader:
            loss = model(batch).square().sum()
            (loss if loader.ends_batch else factor * loss).backward()
            optimizer.step()
    return engine


def test_what_the_model_returns_need_not_be_known():
    """Whatever it is, what matters is what becomes of it in the loop."""

    class Opaque:
        def __init__(self, value):
            self.value = value

        def square(self):
            return self.value.square()

    class Hides(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return Opaque(self.inner(x))

    x = torch.randn(10, WIDTH)
    assert spoilt(Hides(nn.Linear(WIDTH, 2)).train(), x).statement(1e-5).is_guarantee
    with pytest.raises(BookkeepingError, match="examples are mixed"):
        spoilt(Hides(Mixes("centres the batch")).train(), x)


@pytest.mark.parametrize("how", MIXING)
def test_an_example_alone_settles_nothing(how):
    """One example is never the wrong one."""
    engine = spoilt(Mixes(how).train(), torch.randn(1, WIDTH), passes=3)
    stated = engine.statement(1e-5)
    assert not stated.is_guarantee
    assert any("no rehearsal has checked" in caveat for caveat in stated.caveats)


@pytest.mark.parametrize("factor", [math.nan, 0.0])
def test_bad_rehearsals_settle_nothing(factor):
    """A loop that knows a rehearsal when it sees one gets no guarantee."""
    x = torch.randn(10, WIDTH)
    engine = spoilt(nn.Linear(WIDTH, 2).train(), x, factor=factor)
    assert engine._step.unchecked == {"weight", "bias"}
    assert not engine.statement(1e-5).is_guarantee
    assert engine.accountant.steps == 1


def test_without_rehearsals_there_is_no_guarantee():
    x = torch.randn(10, WIDTH)
    stated = spoilt(Mixes("averages the copies").train(), x, rehearse=False).statement(1e-5)
    assert not stated.is_guarantee
    assert any("rehearse=False" in caveat for caveat in stated.caveats)


def test_only_rehearsals_cost_weight_gradients():
    modes = [True, False, True, False]
    recorder = Recorder(model := bert().train(), iter(modes).__next__)
    for rehearses in modes:
        of_class(model, labelled()).sum().backward()
        assert all((param.grad is not None) == rehearses for param in model.parameters())
        recorder.collect(loss_reduction="sum")
        assert all(param.grad is None for param in model.parameters())
    recorder.remove()
    of_class(model, labelled()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def tied_uses(dtype, *, cancel=False):
    """Two lookups and two products of one table, and all of it formed in float64."""
    torch.manual_seed(2)
    table = torch.empty(30, 4, dtype=dtype)
    index = torch.randint(0, 30, (3, 6))
    r, a = torch.randn(3, 6, 4), torch.randn(3, 5, 4)
    g = torch.randn(3, 5, 30)
    if cancel:  # one product that takes away what was looked up
        index, r = torch.full((3, 1), 7), r[:, :1]
        a, g = r, -nn.functional.one_hot(index, 30).to(r)
    uses = [Rows(table, index, r.to(dtype)), Outer(table, a.to(dtype), g.to(dtype), arena=Arena())]
    formed = torch.einsum("bti,btj->bij", g.double(), a.double())
    looked = torch.zeros(3, 30, 4, dtype=torch.float64)
    looked.scatter_add_(1, index[:, :, None].expand(-1, -1, 4), r.double())
    return uses, looked, formed


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_sums_of_uses_have_the_norm_of_the_sum(dtype, close, monkeypatch):
    uses, looked, formed = tied_uses(dtype)
    weights = torch.rand(3, dtype=dtype)
    cases = [(uses, looked + formed), ([uses[0]] * 2, 2 * looked), ([uses[1]] * 3, 3 * formed)]
    cases.append((uses * 2, 2 * (looked + formed)))
    for parts, truth in cases:
        total = summed(parts)
        torch.testing.assert_close(total.explicit().double(), truth, rtol=close, atol=close)
        monkeypatch.setattr(Rows, "explicit", None)
        found, sums = norms(total), weighted_sum(total, weights)
        monkeypatch.undo()
        exact = truth.norm(dim=(1, 2))
        assert (found >= exact * (1 - 4 * torch.finfo(dtype).eps)).all()
        torch.testing.assert_close(found, exact, rtol=close, atol=0)
        expected = torch.einsum("b,bij->ij", weights.double(), truth)
        torch.testing.assert_close(sums, expected, rtol=close, atol=close)
    total.zero(torch.tensor([True, False, True]))
    assert (norms(total) > 1e-99).tolist() == [False, True, False]


def test_uses_that_cancel_keep_a_norm_that_rounding_cannot_undercut():
    uses, looked, formed = tied_uses(torch.float32, cancel=True)
    assert not (looked + formed).any()
    found = summed(uses)
    assert isinstance(found, Tied)
    assert (norms(found) > 0).all()
    assert (norms(found) < 1e-5 * looked.norm(dim=(1, 2))).all()


def test_a_large_tied_table_is_never_formed_and_l1_says_so():
    """GPT-2's own vocabulary: formed, the gradients of these examples would need 3 GB."""
    table, index = torch.empty(50257, 768), torch.randint(0, 50257, (20, 3))
    outer = Outer(table, torch.randn(20, 2, 768), torch.randn(20, 2, 50257), arena=Arena())
    total = summed([Rows(table, index, torch.randn(20, 3, 768)), outer])
    assert norms(total).shape == (20,)
    assert weighted_sum(total, torch.ones(20)).shape == table.shape
    with pytest.raises(ValueError, match="too large to be formed"):
        norms(total, 1)


@pytest.mark.parametrize("numbers", [1, 100, 1 << 18])
def test_l1_norms_of_what_is_not_formed_come_in_pieces(numbers, monkeypatch):
    monkeypatch.setattr(gradients, "_CACHED", numbers)
    a, g = torch.randn(7, 2, 8), torch.randn(7, 2, 6)
    outer = Outer(torch.empty(6, 8), a, g, arena=Arena())
    assert not outer._formed
    expected = torch.einsum("bto,bti->boi", g.double(), a.double()).abs().sum(dim=(1, 2))
    torch.testing.assert_close(norms(outer, 1), expected)


def test_the_engine_trains_a_transformer():
    torch.manual_seed(1)
    model = bert(hidden_dropout_prob=0.1).train()
    data = labelled()
    records = torch.utils.data.TensorDataset(
        *(value.repeat(8, 1) for value in (data["input_ids"],))
    )
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data_loader=torch.utils.data.DataLoader(records, batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (ids,) in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(input_ids=ids).logits, ids[:, 0] % 3).backward()
        optimizer.step()
    assert engine.accountant.steps == 2
    assert engine.skipped_examples == 0
    assert engine.statement(1e-5).is_guarantee
    assert all(param.grad.isfinite().all() for param in model.parameters())
