"""What things are called elsewhere: names from NumPy, PyTorch, TensorFlow and JAX, answered by flowrt's own.

Law: words only. Whoever lacks an attribute asks `absent` for the error to raise. Each line of a page says what to write
here, then what others call that. ``NAME`` stands for the very name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

PAGES = {
    "fr": """
        fr.astype(x, dtype): cast convert_element_type saturate_cast
        fr.constant(value): tensor array asarray as_tensor convert_to_tensor from_numpy
        fr.placeholder(dtype, shape): Input TensorSpec
        fr.concat(values, axis): concatenate cat hstack vstack dstack row_stack column_stack append
        fr.stack(values, axis): pack
        fr.unstack(x, axis): unpack unbind split array_split chunk
        fr.take(x, indices, axis): gather index_select embedding
        fr.transpose(x, axes): permute swapaxes moveaxis permute_dims matrix_transpose t rollaxis
        fr.reshape(x, shape): view ravel flatten
        fr.expand_dims(x, axis): unsqueeze newaxis
        fr.broadcast_to(x, shape): expand broadcast broadcast_in_dim
        fr.tile(x, repeats): repeat
        x[::-1]: flip reverse flipud fliplr
        fr.shape_of(x): shape
        fr.size(x): numel
        fr.rank(x): ndim
        fr.clip(x, min, max): clamp clip_by_value
        fr.pow(a, b): power float_power
        fr.subtract(a, b): sub
        fr.multiply(a, b): mul
        fr.divide(a, b): div true_divide truediv
        fr.floor_divide(a, b): floordiv
        fr.remainder(a, b): mod fmod floormod
        fr.negative(x): neg
        fr.abs(x): absolute fabs
        fr.add_n(values): accumulate_n
        fr.asin(x): arcsin
        fr.acos(x): arccos
        fr.atan(x): arctan
        fr.atan2(y, x): arctan2
        fr.round(x): rint around
        fr.exp(x * np.log(2)): exp2
        fr.equal(a, b): eq
        fr.not_equal(a, b): ne
        fr.less(a, b): lt
        fr.less_equal(a, b): le
        fr.greater(a, b): gt
        fr.greater_equal(a, b): ge
        fr.where(condition, a, b): select masked_fill
        fr.matmul(a, b): mm bmm dot_general batch_matmul
        fr.einsum(subscripts, ...): inner outer
        fr.sum(x, axis): reduce_sum
        fr.mean(x, axis): reduce_mean average
        fr.max(x, axis): reduce_max amax
        fr.min(x, axis): reduce_min amin
        fr.prod(x, axis): reduce_prod
        fr.any(x, axis): reduce_any
        fr.all(x, axis): reduce_all
        fr.std(x, axis): reduce_std
        fr.var(x, axis): reduce_variance variance
        fr.logsumexp(x, axis): reduce_logsumexp
        fr.sqrt(fr.sum(fr.square(x))): norm
        fr.segment_sum(x, ids, n): unsorted_segment_sum bincount
        fr.scatter_add(x, indices, updates): index_add scatter_nd
        fr.sigmoid(x): logistic expit
        fr.silu(x): swish
        fr.nn.NAME: softmax log_softmax conv2d max_pool2d avg_pool2d batch_norm layer_norm dropout lstm embedding_lookup
        fr.nn.NAME: softmax_cross_entropy sigmoid_cross_entropy bias_add moments
        fr.nn.max_pool2d(x, window): max_pool MaxPool2d
        fr.nn.avg_pool2d(x, window): avg_pool AvgPool2d
        fr.nn.conv2d(x, filters): conv Conv2d Conv2D
        fr.nn.lstm(x, h, c, w_x, w_h, bias): LSTM
        fr.nn.softmax_cross_entropy(logits, labels): cross_entropy nll_loss
        fr.nn.sigmoid_cross_entropy(logits, labels): binary_cross_entropy
        fr.mean(fr.square(a - b)): mse_loss
        fr.mean(fr.abs(a - b)): l1_loss
        fr.matmul(x, w) + b: linear Linear dense Dense
        fr.abs(a - b) <= limit: isclose
        fr.all(fr.abs(a - b) <= limit): allclose
        fr.sum(fr.astype(x != 0, "int64"), axis): count_nonzero
        fr.where(x < 0, fr.ceil(x), fr.floor(x)): trunc
        fr.logsumexp(fr.stack([a, b]), 0): logaddexp
        a + weight * (b - a): lerp
        x[1:] - x[:-1]: diff
        x[start:stop]: narrow
        x * (np.pi / 180): deg2rad radians
        fr.random.normal(shape): randn random_normal normal random_normal_initializer
        fr.random.uniform(shape): rand random_uniform uniform random_uniform_initializer
        fr.random.uniform(shape) < p: bernoulli
        fr.gradients(ys, xs): grad gradient GradientTape value_and_grad vjp autograd backward
        fr.stop_gradient(x): no_grad detach
        fr.map_fn(fn, xs): vmap vectorized_map map
        fr.while_loop(condition, body, loop_vars): fori_loop
        fr.case(pairs): switch_case
        fr.identity(x): copy clone
        fr.zeros(shape, dtype): empty zeros_initializer
        fr.zeros_like(x): empty_like
        fr.full(shape, value): fill
        fr.name_scope(name): variable_scope named_scope
        fr.Session(graph): run InteractiveSession
        nothing, for fr.Session(graph) starts variables: global_variables_initializer initialize_all_variables
        with fr.Graph() as graph: get_default_graph reset_default_graph
        fr.placeholder(dtype, shape): placeholder_with_default
        fr.Options: ConfigProto
        fr.op: py_function py_func numpy_function
        fr.astype(x, "float32"): to_float
        fr.astype(x, "int32"): to_int32
        fr.FIFOQueue(capacity, dtypes): Queue
        fr.Variable(initial): Parameter get_variable
        fr.Checkpoints(url): save load Checkpoint CheckpointManager Saver
        fr.LocalCluster(worker=n): Server
        fr.train.Replicated: pmap distribute DataParallel
        fr.optim.NAME: SGD Momentum AdaGrad RMSProp Adam AdamW clip_by_global_norm
        fr.optim.clip_by_global_norm(gradients, limit): clip_by_norm global_norm
        fr.Session(graph).compile(fetches, feeds): function jit compile
        fr.Graph: Sequential Module Model
        fr.mixed_precision(dtype): autocast amp mixed_precision_policy
        fr.LossScaled(optimizer): GradScaler LossScaleOptimizer DynamicLossScale
        fr.op: primitive custom_gradient
        fr.random.normal(shape, seed=1): seed manual_seed set_random_seed
        "NAME", a string, where a dtype is asked for: float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64
        "float32", for there are no kernels of NAME: float16 bfloat16 half complex64 complex128
        "float64", a string, where a dtype is asked for: double
        "int64", a string, where a dtype is asked for: long
        "bool", a string, where a dtype is asked for: bool
    """,
    "fr.nn": """
        fr.nn.softmax_cross_entropy(logits, labels): CrossEntropyLoss softmax_cross_entropy_with_logits nll_loss
        fr.nn.softmax_cross_entropy(logits, labels): sparse_softmax_cross_entropy_with_logits
        fr.nn.sigmoid_cross_entropy(logits, labels): sigmoid_cross_entropy_with_logits binary_cross_entropy_with_logits
        fr.nn.sigmoid_cross_entropy(logits, labels): BCEWithLogitsLoss
        fr.mean(fr.square(a - b)): mse_loss MSELoss l2_loss
        fr.nn.embedding_lookup(table, ids): Embedding Embed
        fr.nn.conv2d(x, filters): Conv2d conv2D Conv2D convolution conv
        fr.nn.max_pool2d(x, window): max_pool MaxPool2d
        fr.nn.avg_pool2d(x, window): avg_pool AvgPool2d mean_pool
        fr.nn.batch_norm(x, scale, offset): batch_normalization BatchNorm2d BatchNorm1d
        fr.nn.layer_norm(x, scale, offset): layer_normalization LayerNorm
        fr.nn.dropout(x, rate): Dropout
        fr.nn.bias_add(x, bias): add_bias
        fr.nn.silu(x): swish
        fr.nn.leaky_relu(x, alpha): LeakyReLU
        fr.nn.relu(x): ReLU
        fr.nn.lstm(x, h, c, w_x, w_h, bias): LSTM LSTMCell dynamic_rnn
        fr.matmul(x, w) + b: Linear linear Dense dense
        fr.one_hot(indices, depth): one_hot
        fr.log(fr.nn.sigmoid(x)): log_sigmoid logsigmoid
        fr.Variable(initial): Parameter
        fr.sigmoid(x): logistic
    """,
    "fr.random": """
        fr.random.normal(shape, mean, stddev): randn standard_normal gauss
        fr.random.uniform(shape, low, high): rand random random_sample
        fr.random.normal(shape, seed=1), for each op has its own seed: seed manual_seed PRNGKey key set_seed default_rng
        fr.random.uniform(shape) < p: bernoulli
    """,
    "fr.optim": """
        fr.optim.AdaGrad(lr): Adagrad AdagradOptimizer
        fr.optim.SGD(lr): sgd GradientDescentOptimizer GradientDescent
        fr.optim.Momentum(lr, momentum): MomentumOptimizer momentum Nesterov
        fr.optim.RMSProp(lr): RMSprop rmsprop RMSPropOptimizer
        fr.optim.Adam(lr): adam AdamOptimizer
        fr.optim.AdamW(lr): adamw
        fr.optim.clip_by_global_norm(gradients, limit): clip_grad_norm_ clip_by_norm
        a tensor for lr, computed in the graph: lr_scheduler schedules
    """,
    "fr.train": """
        fr.train.Replicated: DistributedDataParallel MirroredStrategy ParameterServerStrategy SyncReplicasOptimizer
        fr.train.FirstOf(m): BackupWorkers
        fr.Checkpoints(url): Checkpoint CheckpointManager Saver
        fr.optim.NAME: SGD Momentum AdaGrad RMSProp Adam AdamW
    """,
    "a tensor": """
        session.run(x), which answers an array: numpy item tolist eval value data get
        x.astype(dtype): to type type_as float int long double half bool cast
        x.reshape(shape): view flatten ravel view_as resize
        fr.transpose(x, axes): transpose permute swapaxes t mT moveaxis
        fr.expand_dims(x, axis): unsqueeze
        fr.broadcast_to(x, shape): expand expand_as
        fr.tile(x, repeats): repeat
        fr.take(x, indices, axis): gather index_select take
        fr.concat([x, y], axis): cat
        fr.unstack(x, axis): split chunk unbind
        fr.NAME(x): prod any all std var argmax argmin cumsum logsumexp squeeze
        fr.NAME(x): abs exp log sqrt square sin cos tan tanh sigmoid relu round floor ceil sign clip erf
        fr.NAME(x): matmul dot add multiply divide subtract where
        fr.clip(x, min, max): clamp
        fr.multiply(x, y): mul
        fr.divide(x, y): div
        fr.subtract(x, y): sub
        fr.negative(x): neg
        fr.pow(x, y): pow power
        fr.matmul(x, y): mm bmm
        x.ndim: dim rank
        x.size: numel nelement
        x.shape, or fr.shape_of(x): get_shape
        fr.stop_gradient(x): detach
        fr.gradients(loss, [x]): backward grad requires_grad requires_grad_
        fr.identity(x), for tensors never change: copy clone
        with fr.device("/device:cuda:0"): cuda cpu
        fr.Variable(initial), for tensors never change: assign assign_add assign_sub copy_ add_ mul_ zero_ fill_
        fr.where(condition, a, x): masked_fill
    """,
}


KEYWORDS = """
    axis: dim dims axes dimension reduction_indices
    axes: perm dims permutation
    keepdims: keepdim keep_dims
    x: a input inputs tensor data value array image images
    a: x x1 input left
    b: y x2 other right
    values: tensors arrays inputs
    shape: size dims newshape new_shape output_shape
    strides: stride step window_strides
    dilations: dilation rate rhs_dilation
    padding: pad pads
    paddings: pad padding pad_width pads
    filters: filter kernel weight weights
    groups: feature_group_count
    window: kernel_size ksize pool_size window_shape size
    transpose_a: adjoint_a trans_a
    transpose_b: adjoint_b trans_b
    logits: input predictions y_pred
    labels: target targets y_true
    depth: num_classes classes n
    indices: index ids idx
    ids: indices input index
    shards: table params weight embeddings
    segment_ids: ids index indices
    num_segments: n size minlength
    num_partitions: n
    min: clip_value_min a_min low
    max: clip_value_max a_max high
    mean: loc
    stddev: std scale sigma
    low: minval min a
    high: maxval max b
    epsilon: eps variance_epsilon
    scale: weight gamma
    offset: bias beta
    bias: b biases
    rate: p prob dropout_prob
    value: fill_value constant_values
    repeats: reps multiples
    condition: cond mask pred
    pred: condition cond predicate
    true_fn: if_true
    false_fn: if_false
    cond_fn: cond condition
    body_fn: body
    loop_vars: init_val
    maximum_iterations: max_iterations
    fn: f func function
    xs: elems inputs
    init: initializer initial
    equation: subscripts
    dtype: type out_type
    rows: N num_rows
    columns: M num_columns
    start: low
    stop: end limit high
    step: delta
"""
"""What arguments are called here, and what elsewhere."""


def keyword_hint(name: str, there: Sequence[str]) -> str:
    """Which of the arguments ``there`` is meant by ``name``: what is called so elsewhere, or nearly so here."""
    for line in KEYWORDS.strip().splitlines():
        here, _, names = line.strip().partition(": ")
        if here in there and name in names.split():
            return f"; write {here}="
    from difflib import get_close_matches

    near = get_close_matches(name, there, 1, 0.6)
    return f"; did you mean {near[0]}=?" if near else ""


@cache
def _page(namespace: str) -> dict[str, str]:
    """What to write here, by the name that is typed."""
    found: dict[str, str] = {}
    for line in PAGES.get(namespace, "").strip().splitlines():
        here, _, names = line.strip().rpartition(": ")
        for name in names.split():
            found.setdefault(name, here.replace("NAME", name))
    return found


def hint(namespace: str, name: str, there: Iterable[str] = ()) -> str:
    """What to write for ``name`` in ``namespace``, or for what of ``there`` it is a misspelling of; else nothing."""
    if name.startswith("_"):
        return ""
    here = _page(namespace).get(name)
    if here is not None:
        return f"; write {here}"
    from difflib import get_close_matches  # a millisecond that no right program needs

    near = get_close_matches(name, there, 1, 0.75)
    dot = "x" if namespace == "a tensor" else namespace
    return f"; did you mean {dot}.{near[0]}?" if near else ""


def answering(namespace: str, module: Mapping[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a module that programs know as ``namespace``."""

    def __getattr__(name: str) -> Any:
        raise absent(namespace, module, name)

    def __dir__() -> list[str]:
        return sorted(module["__all__"])

    return __getattr__, __dir__


def absent(namespace: str, module: Mapping[str, Any], name: str) -> AttributeError:
    """The error for a ``name`` that the module does not have."""
    there = [known for known, value in module.items() if _is_public(known, value)]
    return AttributeError(f"module {module['__name__']!r} has no attribute {name!r}{hint(namespace, name, there)}")


def _is_public(name: str, value: Any) -> bool:
    if isinstance(value, ModuleType):
        return False  # which may ask here in its turn
    ours = str(getattr(value, "__module__", "")).startswith("flowrt.") and callable(value)
    return ours and not name.startswith("_") and not name.endswith("_grad")
