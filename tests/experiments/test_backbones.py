"""Backbones against the libraries that their weights come from, in tiny files of their formats."""

import dataclasses
import hashlib

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import transformers
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lap2.experiments import backbones, networks, sources
from lap2.experiments.data import Images
from lap2.train import PrivacyEngine, coverage

STAGES = ((3, 1, 1, 8, 1), (5, 2, 2, 12, 2))


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """One thread, a cache of its own, no network, and networks of the same form but tiny."""
    monkeypatch.setenv("LAP2_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, network in TINY.items():
        known = backbones._BACKBONES[name]
        published = known.published and dataclasses.replace(
            known.published, fetch=no_source, sha256=None
        )
        known = dataclasses.replace(
            known, width=network().width, network=network, published=published
        )
        monkeypatch.setitem(backbones._BACKBONES, name, known)
    yield
    torch.set_num_threads(threads)


def no_source():
    raise OSError("not here")


def prepare(size):
    return networks.Prepare(size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))


TINY = {
    "dinov2-s": lambda: networks.transformer(
        prepare(16), patch=4, width=16, depth=3, heads=2, gain=True
    ),
    "efficientnet-lite0": lambda: networks.efficientnet_lite(
        prepare(20), stages=STAGES, stem=8, width=24
    ),
    "vit-b16": lambda: networks.transformer(prepare(16), patch=4, width=16, depth=2, heads=4),
    "tiny-vit": backbones._BACKBONES["tiny-vit"].network,
}


def pictures(count=24, *, channels=3, size=16):
    rng = np.random.default_rng(5)
    train = rng.random((count, channels, size, size), dtype=np.float32)
    test = rng.random((6, channels, size, size), dtype=np.float32)
    return Images("pictures", train, np.arange(count) % 3, test, np.arange(6) % 3)


def agree(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert expected.std() > 1e-3


# The weights, against their own libraries.


def dinov2(image_size):
    """A tiny DINOv2 of transformers, with no parameter at its trivial initial value."""
    config = transformers.Dinov2Config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        mlp_ratio=4,
        image_size=image_size,
        patch_size=4,
        attn_implementation="eager",
    )
    model = transformers.Dinov2Model(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model


def write_onnx(model, path):
    """As torch exports it: linear weights transposed and without their names, positions in two."""
    graph, nodes = {}, []
    model.save_pretrained(path.parent / "published")  # under the names that files have
    published = safetensors.torch.load_file(path.parent / "published" / "model.safetensors")
    for name, value in published.items():
        bias = f"backbone.{name.removesuffix('weight')}bias"
        if name.endswith("position_embeddings"):
            graph["onnx::Reshape_7"], graph["onnx::Concat_8"] = value[:, 1:], value[:, :1]
        elif value.dim() == 2 and name.endswith("weight"):
            weight, product = f"onnx::MatMul_{len(nodes)}", f"product_{len(nodes)}"
            graph[weight] = value.T
            nodes.append(helper.make_node("MatMul", ["x", weight], [product]))
            nodes.append(helper.make_node("Add", [bias, product], [f"sum_{len(nodes)}"]))
        elif "mask_token" not in name:
            graph[f"backbone.{name}"] = value
    graph["decoder.final_conv.bias"] = torch.zeros(1)
    tensors = [numpy_helper.from_array(v.contiguous().numpy(), n) for n, v in graph.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [x], tensors)), path)


@pytest.mark.parametrize("image_size", [16, 28])  # of the positions: the same, or more of them
def test_dinov2_is_the_one_of_transformers(tmp_path, image_size):
    model = dinov2(image_size)
    write_onnx(model, tmp_path / "vit_s_focus.onnx")
    network = backbones.backbone("dinov2-s", folder=tmp_path)
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        agree(network(images), model(network.prepare(images)).last_hidden_state[:, 0])


def timm_vit(timm):
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}
    return timm.models.VisionTransformer(**settings, num_classes=5).eval()


@pytest.mark.parametrize(
    "file", ["vit_base_patch16_224.safetensors", "model.safetensors", "vit_base_patch16_224.pth"]
)
@pytest.mark.parametrize("named", ["folder", "file"])
def test_vit_is_the_one_of_timm(timm, tmp_path, file, named):
    model = timm_vit(timm)
    save = safetensors.torch.save_file if file.endswith("safetensors") else torch.save
    save(model.state_dict(), tmp_path / file)
    folder = tmp_path if named == "folder" else tmp_path / file
    network = backbones.backbone("vit-b16", folder=folder)
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        expected = model.forward_head(
            model.forward_features(network.prepare(images)), pre_logits=True
        )
        agree(network(images), expected)


def test_vit_b16_has_the_shape_of_timms(timm):
    with torch.device("meta"):
        expected = timm.models.vision_transformer.vit_base_patch16_224(num_classes=0)
        found = backbones._vit_b16()
    count = sum(p.numel() for p in found.parameters())
    assert count == sum(p.numel() for p in expected.parameters())
    assert found.width == expected.num_features


@pytest.mark.parametrize("size", [64, 75])
def test_folded_batchnorm_is_what_it_was_after_training(timm, size):
    """At both sizes, as the padding depends on it."""
    model = timm.create_model("tf_efficientnet_lite0").eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.7, 1.3)
            nn.init.normal_(layer.bias, std=0.2)
            layer.running_mean.normal_(std=0.2)
            layer.running_var.uniform_(0.5, 2)
    network = networks.efficientnet_lite(prepare(size))
    networks.load_convolutions(network, model.state_dict())
    images = torch.rand(2, 3, size, size)
    with torch.no_grad():
        expected = model.forward_head(
            model.forward_features(network.prepare(images)), pre_logits=True
        )
        agree(network(images), expected)


def test_weights_of_another_shape_are_refused():
    network = TINY["efficientnet-lite0"]()
    vector = torch.ones(8)
    state = {"conv": torch.ones(8, 3, 5, 5), "a": vector, "b": vector, "c": vector, "d": vector}
    with pytest.raises(RuntimeError, match="size mismatch"):
        networks.load_convolutions(network, state)
    state["conv"] = torch.ones(8, 3, 3, 3)
    with pytest.raises(ValueError, match="shorter"):
        networks.load_convolutions(network, state)


def test_weights_that_cannot_be_had_are_an_error_that_names_every_source(timm, tmp_path):
    other = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=8, depth=1, num_heads=2
    )
    torch.save(other.state_dict(), tmp_path / "vit_base_patch16_224.pth")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(sources.DataError) as error:
        backbones.trainable("vit-b16", "all", classes=3, folder=tmp_path)
    for words in ("not the weights of this network", "not a file of", "cache", "https://"):
        assert words in str(error.value)


def test_downloaded_weights_are_checked_and_kept(monkeypatch, tmp_path):
    write_onnx(dinov2(16), tmp_path / "weights")
    content = (tmp_path / "weights").read_bytes()
    known = backbones._BACKBONES["dinov2-s"]
    answers = [content[:-1] + b"?", content]

    def offer(sha256):
        published = dataclasses.replace(
            known.published, fetch=lambda: answers.pop(0), sha256=sha256
        )
        changed = dataclasses.replace(known, published=published)
        monkeypatch.setitem(backbones._BACKBONES, "dinov2-s", changed)

    offer(hashlib.sha256(content).hexdigest())
    with pytest.raises(sources.DataError, match="checksum is"):
        backbones.backbone("dinov2-s")
    first = backbones.backbone("dinov2-s")
    again = backbones.backbone("dinov2-s")  # no answer is left: from the cache
    assert not answers
    assert backbones._digest(first) == backbones._digest(again)


# The pieces.


@pytest.fixture
def filled(monkeypatch):
    """Every tiny network, with weights and no file."""
    for name, network in TINY.items():
        torch.manual_seed(1)
        made = network()
        with torch.no_grad():
            for param in made.parameters():
                param.add_(torch.randn_like(param) * 0.1)
        known = backbones._BACKBONES[name]
        known = dataclasses.replace(known, network=lambda made=made: made, published=None)
        monkeypatch.setitem(backbones._BACKBONES, name, known)


def test_the_tiny_one_is_always_the_same_and_leaves_the_generator_alone():
    torch.manual_seed(3)
    first = backbones._digest(backbones.backbone("tiny-vit"))
    drawn = torch.rand(1)
    torch.manual_seed(4)
    assert backbones._digest(backbones.backbone("tiny-vit")) == first
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)


@pytest.mark.parametrize("name", backbones.BACKBONES)
def test_all_parts_are_the_same_function_at_the_start(filled, name):
    images = pictures()
    logits = {}
    for part in backbones.PARTS:
        model = backbones.trainable(name, part, classes=7).eval()
        assert not model.head.weight.any()
        torch.manual_seed(2)
        nn.init.normal_(model.head.weight)
        inputs = backbones.features(name, part, images, progress=False)
        assert inputs.train_images.dtype == np.float32
        with torch.no_grad():
            logits[part] = model(torch.from_numpy(inputs.train_images))
    assert logits["all"].shape == (24, 7)
    agree(logits["head"], logits["all"], 3e-3)  # kept in 16 bits
    agree(logits["block"], logits["all"], 3e-3)


@pytest.mark.parametrize("part", backbones.PARTS)
@pytest.mark.parametrize("name", backbones.BACKBONES)
def test_every_part_is_trained_privately(filled, name, part):
    inputs = backbones.features(name, part, pictures(), progress=False)
    model = backbones.trainable(name, part, classes=3).train()
    nn.init.normal_(model.head.weight, std=0.1)
    report = coverage(model)
    assert not report.refused
    assert "vmap" not in {entry.how for entry in report.entries}
    before = [param.detach().clone() for param in model.parameters()]
    records = TensorDataset(
        torch.from_numpy(inputs.train_images), torch.from_numpy(inputs.train_labels)
    )
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.steps == 2
    assert engine.skipped_examples == 0
    assert engine.statement(1e-5).is_guarantee
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("part", backbones.PARTS)
@pytest.mark.parametrize("name", backbones.BACKBONES)
def test_an_empty_sample_is_a_batch_too(filled, name, part):
    inputs = backbones.features(name, part, pictures(), progress=False).train_images
    model = backbones.trainable(name, part, classes=3)
    assert model(torch.from_numpy(inputs[:0])).shape == (0, 3)


def test_grey_images_of_any_size_will_do():
    images = torch.rand(2, 1, 28, 28)
    network = backbones.backbone("tiny-vit")
    agree(network(images), network(images.expand(-1, 3, -1, -1)))
    prepared = network.prepare(images)
    assert prepared.shape == (2, 3, 32, 32)
    assert prepared.min() >= -1
    assert prepared.max() <= 1


# The features on disk.


@pytest.fixture
def counted(monkeypatch):
    """How many images each call computed the features of; ten images to a file."""
    monkeypatch.setattr(backbones, "_CHUNK", 10)
    compute, sizes = backbones._computed, []

    def counting(network, images):
        sizes.append(len(images))
        return compute(network, images)

    monkeypatch.setattr(backbones, "_computed", counting)
    return sizes


def of(part, images, **more):
    return backbones.features("tiny-vit", part, images, progress=False, **more)


def test_features_are_computed_once_for_both_parts(counted):
    images = pictures()
    block = of("block", images)
    assert counted == [10, 10, 4, 6]
    head = of("head", images)
    assert (of("block", images).train_images == block.train_images).all()
    assert len(counted) == 4
    assert head.train_images.shape == (24, 32)
    np.testing.assert_array_equal(head.train_labels, images.train_labels)
    with torch.no_grad():
        direct = backbones.backbone("tiny-vit")(torch.from_numpy(images.test_images))
    agree(torch.from_numpy(head.test_images), direct, 1e-3)


def test_a_limit_is_the_beginning_of_everything(counted):
    images = pictures()
    some = of("head", images, limit=10)
    assert counted == [10, 6]
    assert [len(a) for a in (some.train_images, some.train_labels)] == [10, 10]
    everything = of("head", images)
    assert counted == [10, 6, 10, 4]
    np.testing.assert_array_equal(everything.train_images[:10], some.train_images)
    few = of("all", images, limit=5)
    arrays = (few.train_images, few.train_labels, few.test_images, few.test_labels)
    assert [len(array) for array in arrays] == [5, 5, 5, 5]
    np.testing.assert_array_equal(few.test_images, images.test_images[:5])


def test_an_interrupted_pass_goes_on(counted, monkeypatch):
    def stop(path, content):
        if len(counted) == 2:
            raise KeyboardInterrupt
        save(path, content)

    save = backbones.keep
    monkeypatch.setattr(backbones, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        of("head", pictures())
    monkeypatch.setattr(backbones, "keep", save)
    of("head", pictures())
    assert counted == [10, 10, 10, 4, 6]


def test_other_images_or_weights_have_other_features(counted, filled):
    images = pictures()
    of("head", images)
    images.train_images[3] = 0
    of("head", images)
    assert counted == [10, 10, 4, 6, 10]
    with torch.no_grad():
        next(backbones.backbone("tiny-vit").body.parameters()).mul_(2)
    of("head", images)
    assert len(counted) == 9


def test_what_is_too_large_for_16_bits_keeps_32():
    small, large = np.float32([1, 65000]), np.float32([1, 70000])
    assert backbones._in_16_bits(small).dtype == np.float16
    np.testing.assert_array_equal(backbones._in_16_bits(large), large)


@pytest.mark.parametrize(
    ("name", "part", "more", "words"),
    [
        ("resnet", "head", {}, "name must be one of"),
        ("tiny-vit", "neck", {}, "part must be one of"),
        ("tiny-vit", "head", {"limit": 0}, "limit must be"),
    ],
)
def test_bad_arguments_are_refused(name, part, more, words):
    with pytest.raises(ValueError, match=words):
        backbones.features(name, part, pictures(), **more)
    if not more:
        with pytest.raises(ValueError, match=words):
            backbones.trainable(name, part, classes=3)
