"""Recipes: what they hold, and what is refused."""

import dataclasses
import json

import pytest

from lap2.experiments.recipe import (
    COLUMNS,
    Recipe,
    RecipeError,
    load_recipe,
    read_config,
    recipe_names,
)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_that_is_shipped_can_be_read_and_goes_around(name):
    recipe = load_recipe(name)
    assert Recipe.of(recipe.asdict()) == recipe


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist"])
def test_table2_is_the_papers_setting(dataset):
    recipe = load_recipe(f"table2-{dataset}")
    assert recipe.batch_size / 60_000 == 0.0043
    assert (recipe.steps, recipe.max_grad_norm, recipe.delta) == (5860, 1.0, 1e-5)
    assert (recipe.label_smoothing, recipe.weight_decay) == (0.15, 1e-4)


def test_cifar10_is_the_papers_setting():
    recipe = load_recipe("cifar10-vit")
    assert recipe.batch_size / 50_000 == 0.01668
    assert (recipe.steps, recipe.epsilon) == (900, 0.75)


def test_changes_win_over_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('dataset = "digits"\nsteps = 5\n')
    assert load_recipe(path) == Recipe(dataset="digits", steps=5)
    assert load_recipe(path, steps=6).steps == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 5", "'stepz'"),
        ("steps = 0", "steps must be an integer at least 1, got 0"),
        ("steps = 2.5", "steps must be an integer"),
        ("steps = true", "steps must be an integer"),
        ("learning_rate = nan", "learning_rate must be a finite number above 0, got nan"),
        ('dataset = "imagenet"', "dataset must be one of"),
        ("dataset = 5", "dataset must be a text"),
        ('model = "resnet"', "model must be"),
        ('dataset = "cifar10"', "model must be"),
        ('optimizer = "adam"', "optimizer must be one of"),
        ('accounting = "published"\nmechanism = "gaussian"', "accounting must be exact"),
        ('release = "magic"', "release must be one of"),
        ('release = "bits"\nmechanism = "gaussian"', "release must be values for mechanism"),
        ("tau = -1.0", "tau must be a finite number at least 0"),
        ('tau = 1.0\nrelease = "bits"', "tau must be 0 where bits are released"),
        ('tau = 1.0\nmechanism = "gaussian"', "tau must be 0 where bits are released"),
        ("copies = 2.0", "copies must be an integer at least 0"),
        ('copies = "auto"', "copies must be an integer at least 0"),
        ('copies = 2\nrelease = "values"', "copies must be 0 where values are released, got 2"),
        ('copies = 2\nmechanism = "laplace-l1"', "copies must be 0 where values are released"),
        ("copies = 2\ntau = 1.0", "copies must be 0 where values are released"),
        ("shortened = 2\nnoise_multiplier = 1.0", "noise_multiplier must be 0 for a shortened run"),
        ("holdout = -1", "holdout must be an integer at least 0"),
        ("delta = 1.0", "delta must be strictly between"),
        ("nonsense", "cannot be read"),
        ("steps = 5\nsteps = 5", "cannot be read: Cannot overwrite"),
        ("steps = [[1]]", "steps must be a text or a number, got a list"),
        ("steps = 2020-01-01", "steps must be a text or a number, got a date"),
        ("[steps]", "steps must be a text or a number, got a dict"),
        ("steps = " + "9" * 5000, "cannot be read"),
        ("steps = 0x" + "f" * 17, "steps must be a number of 64 bits, got one of 68"),
        ("steps = 0x" + "f" * 9000, "steps must be a number of 64 bits, got one of 36000"),
        ("epsilon = 0x" + "f" * 400, "epsilon must be a number of 64 bits"),
        ("epsilon = true", "epsilon must be a finite number above 0, got True"),
        ("epsilon = inf", "epsilon must be a finite number above 0, got inf"),
        ("tau = false", "tau must be a finite number at least 0"),
        ("release = false", "release must be a text"),
        ("seed = " + "[" * 5000, "nested too deep"),
        ("#" * 70_000, "at most 65536 bytes"),
    ],
)
def test_bad_recipes_are_refused_with_the_field_and_the_value(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"bad\.toml.*{message}"):
        load_recipe(path)


def test_a_recipe_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bad.toml").write_bytes(b'dataset = "\xff"')
    with pytest.raises(RecipeError, match=r"cannot be read: .*utf-8"):
        load_recipe(tmp_path / "bad.toml")


def test_a_whole_number_is_the_same_recipe_as_one_with_a_point(tmp_path):
    (tmp_path / "whole.toml").write_text("epsilon = 2\nweight_decay = 0")
    recipe = load_recipe(tmp_path / "whole.toml")
    assert repr(recipe) == repr(Recipe(epsilon=2.0, weight_decay=0.0))


def test_the_configuration_of_a_run_goes_around(tmp_path):
    recipe = load_recipe("digits", tau=0.5)
    (tmp_path / "config.json").write_text(json.dumps(recipe.asdict()))
    assert read_config(tmp_path / "config.json") == recipe


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"steps": 5, "steps": 6}', "name every field once"),
        (b'{"epsilon": NaN}', "finite numbers only"),
        (b"[" * 9999, "nested so deep"),
        (b"[]", "must hold the fields"),
        (b"\xff", "cannot be read"),
        (b'{"steps": "5"}', "steps must be an integer"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RecipeError, match=rf"config\.json.*{message}"):
        read_config(tmp_path / "config.json")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"one of .*mnist.*got 'nope'"):
        load_recipe("nope")
    with pytest.raises(ValueError, match="cannot be read"):
        load_recipe("nope.toml")


def test_columns_differ_in_the_mechanism_only():
    names = {field.name for field in dataclasses.fields(Recipe)}
    for changes in COLUMNS.values():
        assert set(changes) <= {"mechanism", "accounting", "release"} <= names
        Recipe(**changes)
    assert len({Recipe(**changes) for changes in COLUMNS.values()}) == 5
