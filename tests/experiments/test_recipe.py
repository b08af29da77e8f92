"""Recipes: what they hold, and what is refused."""

import dataclasses

import pytest

from lap2.experiments.recipe import COLUMNS, Recipe, load_recipe, recipe_names


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
        ('denoise = "magic"', "denoise must be one of"),
        ("denoise = -1.0", "denoise must be a finite number above 0"),
        ("holdout = -1", "holdout must be an integer at least 0"),
        ("delta = 1.0", "delta must be strictly between"),
        ("nonsense", "cannot be read"),
    ],
)
def test_bad_recipes_are_refused_with_the_field_and_the_value(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises((TypeError, ValueError), match=message):
        load_recipe(path)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"one of .*mnist.*got 'nope'"):
        load_recipe("nope")
    with pytest.raises(ValueError, match="cannot be read"):
        load_recipe("nope.toml")


def test_columns_differ_in_the_mechanism_only():
    names = {field.name for field in dataclasses.fields(Recipe)}
    for changes in COLUMNS.values():
        assert set(changes) <= {"mechanism", "accounting", "denoise"} <= names
        Recipe(**changes)
    assert len({Recipe(**changes) for changes in COLUMNS.values()}) == 5
