"""What is asked of a tensor."""

PAGE = """
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
session.run(x), which answers an array: block_until_ready tobytes dump data_ptr itemset
x itself: contiguous cpu_ pin_memory
x.dtype.itemsize: itemsize element_size
x.size * x.dtype.itemsize: nbytes
x.ndim: ndimension
x.reshape(shape): reshape_as unflatten resize_
fr.take(x, indices, axis): select
fr.full(shape, value): new_full fill
fr.ones(shape): new_ones
fr.zeros(shape): new_zeros new_empty
fr.constant(value): new_tensor
fr.Variable(initial), for tensors never change: div_ clamp_ relu_ masked_fill_ scatter_ scatter_add_ index_add_
fr.Variable(initial), for tensors never change: sub_ squeeze_ unsqueeze_ index_copy_ index_fill_ index_put_ eq_
fr.Variable(initial), for tensors never change: normal_ uniform_ random_ put_ pow_ t_ set_shape detach_
fr.NAME(x): acos asin atan cosh sinh log1p expm1 rsqrt reciprocal isnan isfinite elu gelu silu
fr.NAME(x, y): equal not_equal greater greater_equal less less_equal maximum minimum atan2 hypot remainder
fr.NAME(x, y): logical_and logical_or logical_xor floor_divide tensordot einsum
fr.NAME(x): logical_not softplus unstack
fr.NAME(x, shape): broadcast_to
fr.NAME(x, repeats): tile
fr.nn.NAME(x): softmax log_softmax
x.device: is_cuda get_device sharding
fr.gradients(loss, [x]): grad_fn retain_grad register_hook
x.dtype, which says it: is_floating_point
v.read(), of a variable: read_value sparse_read
v.NAME(indices, updates), of a variable: scatter_update scatter_add scatter_sub
fr.isfinite(x): is_finite
"""
