"""Random forests and extremely randomized trees: means of trees, each of a sample of the rows or of random borders."""

from __future__ import annotations

from typing import Any, ClassVar

from ronde.ml.trees.forest_estimator import ForestOfClasses, ForestOfNumbers

__all__ = ["ExtraTreesClassifier", "ExtraTreesRegressor", "RandomForestClassifier", "RandomForestRegressor"]


class RandomForestClassifier(ForestOfClasses):
    """Trees of samples of the rows, whose mean predicts the probabilities of classes.

        model = RandomForestClassifier(n_estimators=200, on="local:2").fit(X, y)

    The parameters are those of scikit-learn's estimator of this name, and so are their defaults. The model has the
    same bits for any number of tasks and threads.

    Args:
        n_estimators: The number of trees.
        criterion: The impurity that splits lower: "gini", "entropy" or "log_loss", which is the same as "entropy".
        max_depth: Of a tree (None: no limit).
        min_samples_split: How many rows a node has that is split; a float: which part of all rows.
        min_samples_leaf: How many rows a leaf has at least; a float: which part of all rows.
        min_weight_fraction_leaf: Which part of the weight of the rows of a tree a leaf has at least.
        max_features: How many columns are drawn for each node: a number, a part of all (float), "sqrt", "log2", or None
            for all.
        max_leaf_nodes: Of a tree (None: no limit). With a limit, the leaf whose split lowers the impurity most is split
            next.
        min_impurity_decrease: A split has to lower the impurity, times the node's part of the weight, by so much.
        bootstrap: Whether each tree draws its rows, with replacement.
        oob_score: Whether trees predict the rows that they have not drawn; or a function that returns `oob_score_`, of
            the numbers of classes of the rows and of those predicted.
        random_state: An int or a `numpy.random.RandomState`; None: 0.
        verbose: Whether to print a line for each step, which adds a quarter of the trees.
        warm_start: Whether a second fit keeps the trees of the first, and adds others.
        class_weight: A factor of the rows' weights for each class, as a dict; "balanced": classes weigh the same.
        max_samples: How many rows a tree draws, in the mean: a number, or a part of all (float); None: as many as there
            are.
        max_bins: How many bins a column has at most, without that of missing values.
        categorical_features: Which columns are categories: numbers, names, or a mask (None: none is; "from_dtype":
            those of a data frame whose dtype is of categories). They are numbers from 0; in data frames also texts.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: the ranks of this job, or one task that uses the
            cores of this machine).

    Attributes:
        classes_: The classes, sorted.
        feature_importances_: How much the splits of each column lower the impurity, with the sum 1.
        oob_score_: The accuracy of the predictions of rows by trees that have not drawn them, with `oob_score`, of rows
            in memory.
        oob_decision_function_: The probabilities of these predictions, float64 of shape (rows, classes); NaN for a row
            that all trees have drawn.
        history_: A `History` with `step`, `trees`, and the mean number of `leaves` of the trees of the step.
    """

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: int | float = 2,
        min_samples_leaf: int | float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: int | float | str | None = "sqrt",
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        oob_score: Any = False,
        random_state: Any = None,
        verbose: int = 0,
        warm_start: bool = False,
        class_weight: Any = None,
        max_samples: int | float | None = None,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        on: Any = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.criterion = criterion
        self.max_depth = max_depth
        self.min_samples_split = min_samples_split
        self.min_samples_leaf = min_samples_leaf
        self.min_weight_fraction_leaf = min_weight_fraction_leaf
        self.max_features = max_features
        self.max_leaf_nodes = max_leaf_nodes
        self.min_impurity_decrease = min_impurity_decrease
        self.bootstrap = bootstrap
        self.oob_score = oob_score
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start
        self.class_weight = class_weight
        self.max_samples = max_samples
        self.max_bins = max_bins
        self.categorical_features = categorical_features
        self.on = on


class RandomForestRegressor(ForestOfNumbers):
    """Trees of samples of the rows, whose mean predicts numbers.

        model = RandomForestRegressor(n_estimators=200, on="local:2").fit(X, y)

    The parameters are those of scikit-learn's estimator of this name, and so are their defaults. The model has the
    same bits for any number of tasks and threads.

    Args:
        n_estimators: The number of trees.
        criterion: The impurity that splits lower: "squared_error".
        max_depth: Of a tree (None: no limit).
        min_samples_split: How many rows a node has that is split; a float: which part of all rows.
        min_samples_leaf: How many rows a leaf has at least; a float: which part of all rows.
        min_weight_fraction_leaf: Which part of the weight of the rows of a tree a leaf has at least.
        max_features: How many columns are drawn for each node: a number, a part of all (float), "sqrt", "log2", or None
            for all.
        max_leaf_nodes: Of a tree (None: no limit). With a limit, the leaf whose split lowers the impurity most is split
            next.
        min_impurity_decrease: A split has to lower the impurity, times the node's part of the weight, by so much.
        bootstrap: Whether each tree draws its rows, with replacement.
        oob_score: Whether trees predict the rows that they have not drawn; or a function that returns `oob_score_`, of
            the targets of the rows and of the predictions.
        random_state: An int or a `numpy.random.RandomState`; None: 0.
        verbose: Whether to print a line for each step, which adds a quarter of the trees.
        warm_start: Whether a second fit keeps the trees of the first, and adds others.
        max_samples: How many rows a tree draws, in the mean: a number, or a part of all (float); None: as many as there
            are.
        max_bins: How many bins a column has at most, without that of missing values.
        categorical_features: Which columns are categories: numbers, names, or a mask (None: none is; "from_dtype":
            those of a data frame whose dtype is of categories). They are numbers from 0; in data frames also texts.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: the ranks of this job, or one task that uses the
            cores of this machine).

    Attributes:
        feature_importances_: How much the splits of each column lower the impurity, with the sum 1.
        oob_score_: The coefficient of determination of the predictions of rows by trees that have not drawn them, with
            `oob_score`, of rows in memory.
        oob_prediction_: These predictions, float64 of shape (rows,); NaN for a row that all trees have drawn.
        history_: A `History` with `step`, `trees`, and the mean number of `leaves` of the trees of the step.
    """

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "squared_error",
        max_depth: int | None = None,
        min_samples_split: int | float = 2,
        min_samples_leaf: int | float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: int | float | str | None = 1.0,
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        oob_score: Any = False,
        random_state: Any = None,
        verbose: int = 0,
        warm_start: bool = False,
        max_samples: int | float | None = None,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        on: Any = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.criterion = criterion
        self.max_depth = max_depth
        self.min_samples_split = min_samples_split
        self.min_samples_leaf = min_samples_leaf
        self.min_weight_fraction_leaf = min_weight_fraction_leaf
        self.max_features = max_features
        self.max_leaf_nodes = max_leaf_nodes
        self.min_impurity_decrease = min_impurity_decrease
        self.bootstrap = bootstrap
        self.oob_score = oob_score
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start
        self.max_samples = max_samples
        self.max_bins = max_bins
        self.categorical_features = categorical_features
        self.on = on


class ExtraTreesClassifier(ForestOfClasses):
    """Trees with random borders, whose mean predicts the probabilities of classes.

        model = ExtraTreesClassifier(n_estimators=200, on="local:2").fit(X, y)

    The parameters are those of scikit-learn's estimator of this name, and so are their defaults. The model has the
    same bits for any number of tasks and threads.

    Args:
        n_estimators: The number of trees.
        criterion: The impurity that splits lower: "gini", "entropy" or "log_loss", which is the same as "entropy".
        max_depth: Of a tree (None: no limit).
        min_samples_split: How many rows a node has that is split; a float: which part of all rows.
        min_samples_leaf: How many rows a leaf has at least; a float: which part of all rows.
        min_weight_fraction_leaf: Which part of the weight of the rows of a tree a leaf has at least.
        max_features: How many columns are drawn for each node: a number, a part of all (float), "sqrt", "log2", or None
            for all.
        max_leaf_nodes: Of a tree (None: no limit). With a limit, the leaf whose split lowers the impurity most is split
            next.
        min_impurity_decrease: A split has to lower the impurity, times the node's part of the weight, by so much.
        bootstrap: Whether each tree draws its rows, with replacement.
        oob_score: Whether trees predict the rows that they have not drawn; or a function that returns `oob_score_`, of
            the numbers of classes of the rows and of those predicted.
        random_state: An int or a `numpy.random.RandomState`; None: 0.
        verbose: Whether to print a line for each step, which adds a quarter of the trees.
        warm_start: Whether a second fit keeps the trees of the first, and adds others.
        class_weight: A factor of the rows' weights for each class, as a dict; "balanced": classes weigh the same.
        max_samples: How many rows a tree draws, in the mean: a number, or a part of all (float); None: as many as there
            are.
        max_bins: How many bins a column has at most, without that of missing values.
        categorical_features: Which columns are categories: numbers, names, or a mask (None: none is; "from_dtype":
            those of a data frame whose dtype is of categories). They are numbers from 0; in data frames also texts.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: the ranks of this job, or one task that uses the
            cores of this machine).

    Attributes:
        classes_: The classes, sorted.
        feature_importances_: How much the splits of each column lower the impurity, with the sum 1.
        oob_score_: The accuracy of the predictions of rows by trees that have not drawn them, with `oob_score`, of rows
            in memory.
        oob_decision_function_: The probabilities of these predictions, float64 of shape (rows, classes); NaN for a row
            that all trees have drawn.
        history_: A `History` with `step`, `trees`, and the mean number of `leaves` of the trees of the step.
    """

    _is_extra_random: ClassVar[bool] = True

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: int | float = 2,
        min_samples_leaf: int | float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: int | float | str | None = "sqrt",
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = False,
        oob_score: Any = False,
        random_state: Any = None,
        verbose: int = 0,
        warm_start: bool = False,
        class_weight: Any = None,
        max_samples: int | float | None = None,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        on: Any = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.criterion = criterion
        self.max_depth = max_depth
        self.min_samples_split = min_samples_split
        self.min_samples_leaf = min_samples_leaf
        self.min_weight_fraction_leaf = min_weight_fraction_leaf
        self.max_features = max_features
        self.max_leaf_nodes = max_leaf_nodes
        self.min_impurity_decrease = min_impurity_decrease
        self.bootstrap = bootstrap
        self.oob_score = oob_score
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start
        self.class_weight = class_weight
        self.max_samples = max_samples
        self.max_bins = max_bins
        self.categorical_features = categorical_features
        self.on = on


class ExtraTreesRegressor(ForestOfNumbers):
    """Trees with random borders, whose mean predicts numbers.

        model = ExtraTreesRegressor(n_estimators=200, on="local:2").fit(X, y)

    The parameters are those of scikit-learn's estimator of this name, and so are their defaults. The model has the
    same bits for any number of tasks and threads.

    Args:
        n_estimators: The number of trees.
        criterion: The impurity that splits lower: "squared_error".
        max_depth: Of a tree (None: no limit).
        min_samples_split: How many rows a node has that is split; a float: which part of all rows.
        min_samples_leaf: How many rows a leaf has at least; a float: which part of all rows.
        min_weight_fraction_leaf: Which part of the weight of the rows of a tree a leaf has at least.
        max_features: How many columns are drawn for each node: a number, a part of all (float), "sqrt", "log2", or None
            for all.
        max_leaf_nodes: Of a tree (None: no limit). With a limit, the leaf whose split lowers the impurity most is split
            next.
        min_impurity_decrease: A split has to lower the impurity, times the node's part of the weight, by so much.
        bootstrap: Whether each tree draws its rows, with replacement.
        oob_score: Whether trees predict the rows that they have not drawn; or a function that returns `oob_score_`, of
            the targets of the rows and of the predictions.
        random_state: An int or a `numpy.random.RandomState`; None: 0.
        verbose: Whether to print a line for each step, which adds a quarter of the trees.
        warm_start: Whether a second fit keeps the trees of the first, and adds others.
        max_samples: How many rows a tree draws, in the mean: a number, or a part of all (float); None: as many as there
            are.
        max_bins: How many bins a column has at most, without that of missing values.
        categorical_features: Which columns are categories: numbers, names, or a mask (None: none is; "from_dtype":
            those of a data frame whose dtype is of categories). They are numbers from 0; in data frames also texts.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: the ranks of this job, or one task that uses the
            cores of this machine).

    Attributes:
        feature_importances_: How much the splits of each column lower the impurity, with the sum 1.
        oob_score_: The coefficient of determination of the predictions of rows by trees that have not drawn them, with
            `oob_score`, of rows in memory.
        oob_prediction_: These predictions, float64 of shape (rows,); NaN for a row that all trees have drawn.
        history_: A `History` with `step`, `trees`, and the mean number of `leaves` of the trees of the step.
    """

    _is_extra_random: ClassVar[bool] = True

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "squared_error",
        max_depth: int | None = None,
        min_samples_split: int | float = 2,
        min_samples_leaf: int | float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: int | float | str | None = 1.0,
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = False,
        oob_score: Any = False,
        random_state: Any = None,
        verbose: int = 0,
        warm_start: bool = False,
        max_samples: int | float | None = None,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        on: Any = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.criterion = criterion
        self.max_depth = max_depth
        self.min_samples_split = min_samples_split
        self.min_samples_leaf = min_samples_leaf
        self.min_weight_fraction_leaf = min_weight_fraction_leaf
        self.max_features = max_features
        self.max_leaf_nodes = max_leaf_nodes
        self.min_impurity_decrease = min_impurity_decrease
        self.bootstrap = bootstrap
        self.oob_score = oob_score
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start
        self.max_samples = max_samples
        self.max_bins = max_bins
        self.categorical_features = categorical_features
        self.on = on
