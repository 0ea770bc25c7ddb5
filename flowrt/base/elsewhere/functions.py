"""What is asked of fr."""

PAGE = """
fr.astype(x, dtype): cast convert_element_type saturate_cast
fr.constant(value): tensor array asarray as_tensor convert_to_tensor from_numpy
fr.placeholder(dtype, shape): Input TensorSpec
fr.concat(values, axis): concatenate cat hstack vstack dstack row_stack column_stack append
fr.stack(values, axis): pack
fr.unstack(x, axis): unpack unbind
fr.take(x, indices, axis): gather index_select embedding
fr.transpose(x, axes): permute swapaxes moveaxis permute_dims matrix_transpose t rollaxis
fr.reshape(x, shape): view ravel flatten
fr.expand_dims(x, axis): unsqueeze newaxis
fr.broadcast_to(x, shape): expand broadcast broadcast_in_dim
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
fr.where(condition, a, b): select select_n masked_fill piecewise
fr.matmul(a, b): mm bmm dot_general batch_matmul
fr.einsum(subscripts, ...): inner outer ger addr
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
fr.nn.conv2d(x, filters): conv Conv2d Conv2D conv_general_dilated conv_with_general_padding
fr.nn.lstm(x, h, c, w_x, w_h, bias): LSTM
fr.nn.softmax_cross_entropy(logits, labels): cross_entropy nll_loss
fr.nn.sigmoid_cross_entropy(logits, labels): binary_cross_entropy
fr.mean(fr.square(a - b)): mse_loss
fr.mean(fr.abs(a - b)): l1_loss
fr.matmul(x, w) + b: linear Linear dense Dense
fr.abs(a - b) <= limit: isclose
fr.all(fr.abs(a - b) <= limit): allclose
fr.sum(fr.astype(x != 0, "int64"), axis): count_nonzero
fr.where(x < 0, fr.ceil(x), fr.floor(x)): trunc fix
fr.logsumexp(fr.stack([a, b]), 0): logaddexp
a + weight * (b - a): lerp
x[1:] - x[:-1]: diff
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
nothing, for fr.Session(graph) starts variables: local_variables_initializer variables_initializer
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
fr.Graph: Sequential Module Model module
fr.mixed_precision(dtype): autocast amp mixed_precision_policy
fr.LossScaled(optimizer): GradScaler LossScaleOptimizer DynamicLossScale
fr.op: primitive custom_gradient
fr.random.normal(shape, seed=1): seed manual_seed set_random_seed
"NAME", a string, where a dtype is asked for: float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64
"float32", for there are no kernels of NAME: float16 bfloat16 half complex64 complex128 to_bfloat16
"float32", a string, where a dtype is asked for: single FloatTensor set_default_dtype get_default_dtype
"float64", a string, where a dtype is asked for: double float_ DoubleTensor
"int64", a string, where a dtype is asked for: long int_ LongTensor
"int32", a string, where a dtype is asked for: intc IntTensor
"bool", a string, where a dtype is asked for: bool bool_ BoolTensor
a string such as "float32": dtype DType
fr.astype(x, "float64"): to_double
fr.astype(x, "int64"): to_int64
x[start:stop], piece by piece: split array_split chunk tensor_split hsplit vsplit dsplit
x[start:stop]: narrow dynamic_slice strided_slice slice slice_in_dim index_in_dim dynamic_index_in_dim
fr.concat([x[-n:], x[:-n]], 0): roll
fr.transpose(x)[::-1]: rot90
fr.take(x, np.repeat(np.arange(rows), n), axis): repeat_interleave
fr.tile(x, repeats), or fr.take(x, np.repeat(np.arange(rows), n), axis): repeat
fr.expand_dims(x, axis): atleast_1d atleast_2d atleast_3d
x[:, None] and y[None, :], which broadcast: meshgrid mgrid ogrid ix_ cartesian_prod
fr.broadcast_to(x, shape): broadcast_arrays broadcast_tensors
x * np.tril(np.ones((n, n), "float32")): tril matrix_band_part band_part
x * np.triu(np.ones((n, n), "float32")): triu
fr.expand_dims(x, -1) * fr.eye(n): diag diagflat diag_embed matrix_diag tensor_diag
fr.einsum("ii->i", x): diagonal diag_part
fr.einsum("ii->", x): trace
fr.sum(a * b, -1): vecdot
fr.sum(a * b): vdot
fr.dot(a, b): mv matvec vecmat
c + fr.matmul(a, b): addmm baddbmm addmv
c + a * b: addcmul
c + a / b: addcdiv
fr.log(x) / np.log(2): log2
fr.log(x) / np.log(10): log10
fr.log(x / (1 - x)): logit
1 - fr.erf(x): erfc
fr.sign(x) * fr.log1p(fr.abs(x) + x * x / (1 + fr.sqrt(x * x + 1))): asinh arcsinh
fr.log(x + fr.sqrt(x * x - 1)): acosh arccosh
(fr.log1p(x) - fr.log1p(-x)) / 2: atanh arctanh
fr.sign(x) * fr.pow(fr.abs(x), 1 / 3): cbrt
x * (180 / np.pi): rad2deg degrees
fr.sin(np.pi * x) / (np.pi * x): sinc
fr.pow(x, n): integer_pow
fr.remainder(a, b): rem truncatemod
fr.reciprocal(x): reciprocal_no_nan
fr.multiply(x, scalar): scalar_mul
fr.square(a - b): squared_difference
fr.where(b == 0, 0.0, a / b): divide_no_nan
fr.where(b == 0, 0.0, a * b): multiply_no_nan
fr.where(a == 0, 0.0, a * fr.log(b)): xlogy
b - a: rsub
fr.maximum(a, b): fmax
fr.minimum(a, b): fmin
fr.maximum(x, limit): clamp_min
fr.minimum(x, limit): clamp_max
fr.max(x, axis) - fr.min(x, axis): ptp
fr.sum((y[1:] + y[:-1]) * (x[1:] - x[:-1])) / 2: trapezoid trapz
fr.min(x, axis) and fr.max(x, axis): aminmax
x - fr.where(x < 0, fr.ceil(x), fr.floor(x)): frac
fr.sign(x): sgn
fr.abs(a) * fr.sign(b): copysign
x < 0: signbit
fr.astype(x > 0, x.dtype): heaviside
fr.mean(fr.astype(x == 0, "float32")): zero_fraction
fr.divide(a, b): realdiv
fr.abs(x) == np.inf: isinf is_inf
x == np.inf: isposinf
x == -np.inf: isneginf
fr.isnan(x): is_nan
fr.isfinite(x): is_finite
fr.where(fr.isnan(x), 0.0, x): nan_to_num
fr.sum(fr.where(fr.isnan(x), 0.0, x), axis): nansum
fr.max(fr.where(fr.isnan(x), -np.inf, x), axis): nanmax
fr.min(fr.where(fr.isnan(x), np.inf, x), axis): nanmin
fr.sum(fr.where(fr.isnan(x), 0.0, x)) / fr.sum(fr.where(fr.isnan(x), 0.0, 1.0)): nanmean
fr.any(fr.expand_dims(x, -1) == values, -1): isin in1d
fr.all(a == b): array_equal array_equiv
fr.sum(fr.astype(fr.expand_dims(x, -1) > edges, "int64"), -1): searchsorted bucketize
fr.sum(fr.astype(fr.expand_dims(x, -1) >= edges, "int64"), -1): digitize
fr.logical_and(a, b), of bools: bitwise_and
fr.logical_or(a, b), of bools: bitwise_or
fr.logical_xor(a, b), of bools: bitwise_xor
fr.logical_not(x), of bools: bitwise_not bitwise_invert invert
a * 2 ** b: left_shift bitwise_left_shift shift_left
a // 2 ** b: right_shift bitwise_right_shift
fr.cumsum(x, axis): cumulative_sum
fr.exp(fr.cumsum(fr.log(x), axis)), of positive numbers: cumprod cumulative_prod
fr.scan(lambda m, v: (fr.maximum(m, v),) * 2, x[0], x)[1]: cummax
fr.scan(lambda m, v: (fr.minimum(m, v),) * 2, x[0], x)[1]: cummin
fr.scan(fn, init, xs): associative_scan foldl foldr rnn
fr.sum(x * fr.one_hot(ids, n), -1): take_along_axis take_along_dim
fr.take(x, ids[..., 0] * columns + ids[..., 1], 0) of x reshaped: gather_nd
fr.where(mask, x, fill), for shapes are the same at every step: boolean_mask masked_select extract compress
fr.nn.moments(x, axis): var_mean std_mean
fr.sum(a * b, -1) * fr.rsqrt(fr.sum(a * a, -1) * fr.sum(b * b, -1)): cosine_similarity
fr.sqrt(fr.sum(fr.square(a - b), -1)): pairwise_distance dist
fr.sqrt(fr.sum(fr.square(a[:, None] - b), -1)): cdist
x * fr.rsqrt(fr.sum(fr.square(x), -1, keepdims=True)): l2_normalize normalize
fr.arange(n) < fr.expand_dims(lengths, -1): sequence_mask
fr.segment_sum(x, ids, n) / fr.segment_sum(fr.ones_like(x), ids, n): segment_mean unsorted_segment_mean
fr.scatter_add(x, indices, updates): scatter index_put put tensor_scatter_nd_add scatter_nd_add scatter_sub
v.scatter_update(indices, updates), of a variable: scatter_update tensor_scatter_nd_update index_copy
v.NAME(value), of a variable: assign assign_add assign_sub
fr.arange(n): range iota broadcasted_iota
np.NAME(...), an array, which is a constant: linspace logspace geomspace tri vander hamming hanning blackman
np.NAME(...), an array, which is a constant: bartlett kaiser tril_indices triu_indices diag_indices indices
np.NAME: pi inf nan e finfo iinfo issubdtype result_type promote_types can_cast ndindex ndenumerate
np.NAME: broadcast_shapes errstate printoptions set_printoptions savetxt loadtxt savez ndarray random_split
x itself, for numbers are real: real conj conjugate positive
nothing, for numbers are real: imag angle complex view_as_real polar
isinstance(x, fr.Tensor): is_tensor is_symbolic_tensor
fr.Options(devices=("cpu:0", "cuda:0")): cuda local_devices list_physical_devices
with fr.device("/device:cuda:0"): device_put set_default_device
session.run(x), which answers an array: device_get get_static_value block_until_ready
fr.gradients(y, xs) of each entry y: jacrev jacfwd jacobian hessian hessians
@fr.op(gradient=...): custom_vjp custom_jvp grad_pass_through RegisterGradient
fr.stop_gradient(x): inference_mode set_grad_enabled
nothing, for gradients are asked for: enable_grad is_grad_enabled requires_grad
fr.Spec(dtype, shape): ShapeDtypeStruct TensorShape Size eval_shape
fr.Variable(initial, trainable=False): local_variables register_buffer
fr.FIFOQueue(capacity, dtypes): RandomShuffleQueue PaddingFIFOQueue PriorityQueue StagingArea QueueRunner
fr.stack(values), or what fr.scan and fr.map_fn answer: TensorArray
fr.ones(shape, dtype): ones_initializer
fr.full(shape, value): constant_initializer
fr.clip(fr.random.normal(shape), -2, 2): truncated_normal truncated_normal_initializer
fr.astype(fr.random.uniform(shape, low, high), "int64"): randint
fr.random.normal(fr.shape_of(x)): randn_like
fr.random.uniform(fr.shape_of(x)): rand_like
fr.argmax(logits - fr.log(-fr.log(fr.random.uniform(shape))), -1): multinomial categorical
fr.train.Replicated: psum pmean all_reduce all_gather distributed
fr.optim: optimizers
fr.data: DataLoader Dataset TFRecordDataset TFRecordReader random_shuffle shuffle_batch permutation randperm
fr.nn: keras layers functional Layer
fr, for there is no namespace NAME: math linalg special fft
fr.reshape(x, shape): unflatten collapse
fr.matmul(a, b): chain_matmul multi_dot sparse_tensor_dense_matmul
fr.op, or an array of NumPy's that is fed: pure_callback apply_along_axis frompyfunc vectorize
session.run(x), whose arrays are printed: print Print
fr.random.normal, fr.random.uniform or arrays of NumPy's: init initializers
fr.map_fn(fn, xs): tree_map
an fr.op of your own, with its fr.kernel: sort argsort lexsort partition argpartition top_k topk
an fr.op of your own, with its fr.kernel: unique nonzero flatnonzero argwhere median mode
an fr.op of your own, with its fr.kernel: quantile percentile nanmedian histogram histc interp
an fr.op of your own, with its fr.kernel: convolve correlate cross kron cov corrcoef roots
an fr.op of your own, with its fr.kernel: polyval polyfit det inverse inv pinv svd qr lu eig
an fr.op of your own, with its fr.kernel: cholesky solve slogdet logdet matrix_inverse erfinv
an fr.op of your own, with its fr.kernel: lgamma digamma logcumsumexp i0 nextafter stft istft
an fr.op of your own, with its fr.kernel: segment_max segment_min unsorted_segment_max
an fr.op of your own, with its fr.kernel: scatter_reduce reverse_sequence invert_permutation
an fr.op of your own, whose fr.kernel raises: Assert assert_equal assert_less assert_greater
"""
