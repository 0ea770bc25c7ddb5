"""What is asked of fr.nn."""

PAGE = """
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
fr.clip(x, 0, 6): relu6 ReLU6
fr.clip(x, -1, 1): hardtanh hard_tanh Hardtanh
fr.clip(x / 6 + 0.5, 0, 1): hardsigmoid hard_sigmoid Hardsigmoid
x * fr.clip(x / 6 + 0.5, 0, 1): hardswish hard_swish hard_silu Hardswish
x * fr.tanh(fr.softplus(x)): mish Mish
1.0507 * fr.elu(x, 1.67326): selu SELU
fr.elu(x): celu CELU ELU
x / (1 + fr.abs(x)): softsign soft_sign Softsign
x - fr.tanh(x): tanhshrink
fr.sign(x) * fr.relu(fr.abs(x) - 0.5): softshrink
fr.where(fr.abs(x) > 0.5, x, 0.0): hardshrink
fr.where(x > limit, x, value): threshold
(x + fr.sqrt(x * x + 4)) / 2: squareplus
fr.nn.softmax(-x): softmin
fr.where(x < 0, weight * x, x): prelu PReLU
a * fr.sigmoid(b): glu GLU
fr.relu(fr.concat([x, -x], -1)): crelu
fr.relu(fr.matmul(x, w) + b): relu_layer
fr.matmul(x, w) + b: xw_plus_b bilinear
fr.nn, in small letters: Softmax Sigmoid Tanh GELU SiLU Softplus
fr.nn.log_softmax(x): LogSoftmax
fr.log(fr.nn.sigmoid(x)): LogSigmoid
fr.NAME: logsumexp identity pad scan erf concat clip tile argmax
fr.identity(x): Identity
fr.reshape(x, shape): Flatten pixel_shuffle pixel_unshuffle depth_to_space space_to_depth
x * fr.rsqrt(fr.mean(fr.square(x), -1, keepdims=True) + 1e-6) * scale: rms_norm RMSNorm
fr.nn.layer_norm(fr.reshape(x, groups), scale, offset): group_norm GroupNorm instance_norm InstanceNorm2d
(x - mean) * fr.rsqrt(var) with fr.nn.moments: standardize
fr.matmul(fr.nn.softmax(fr.matmul(q, k, transpose_b=True) * scale), v): scaled_dot_product_attention
fr.matmul(fr.nn.softmax(fr.matmul(q, k, transpose_b=True) * scale), v): dot_product_attention MultiheadAttention
fr.nn.conv2d(x[:, None], filters[None]): conv1d Conv1d
fr.nn.conv2d(x, filters, groups=channels): depthwise_conv2d separable_conv2d
fr.nn.conv2d(x, filters, dilations=rate): atrous_conv2d
fr.nn.max_pool2d(x[:, None], window): max_pool1d MaxPool1d
fr.nn.avg_pool2d(x[:, None], window): avg_pool1d AvgPool1d
fr.mean(x, (1, 2)): adaptive_avg_pool2d AdaptiveAvgPool2d GlobalAveragePooling2D
fr.max(x, (1, 2)): adaptive_max_pool2d GlobalMaxPooling2D
fr.pad(x, paddings): ZeroPad2d
fr.scan(fn, init, xs): rnn RNN RNNCell GRU GRUCell static_rnn rnn_cell bidirectional_dynamic_rnn
fr.nn.sigmoid_cross_entropy(logits, labels): BCELoss
fr.mean(fr.abs(a - b)): l1_loss L1Loss
fr.nn.softmax_cross_entropy(logits, labels): NLLLoss
fr.mean(fr.where(fr.abs(a - b) < 1, fr.square(a - b) / 2, fr.abs(a - b) - 0.5)): huber_loss HuberLoss
fr.mean(fr.where(fr.abs(a - b) < 1, fr.square(a - b) / 2, fr.abs(a - b) - 0.5)): smooth_l1_loss SmoothL1Loss
fr.sum(p * (fr.log(p) - log_q)): kl_div KLDivLoss
fr.mean(fr.relu(1 - labels * scores)): hinge_embedding_loss hinge_loss
fr.mean(fr.relu(margin - labels * (a - b))): margin_ranking_loss
fr.mean(fr.softplus(-labels * scores)): soft_margin_loss
fr.nn.dropout(x, rate): dropout1d dropout2d Dropout2d alpha_dropout
fr.nn.softmax((logits + noise) / tau), with noise -fr.log(-fr.log(fr.random.uniform(shape))): gumbel_softmax
fr.segment_sum(fr.nn.embedding_lookup(table, ids), rows, n): embedding_bag EmbeddingBag embedding_lookup_sparse
fr.Graph, and functions that build: Module ModuleList ModuleDict Sequential ParameterList
an fr.op of your own, with its fr.kernel: conv3d Conv3d conv2d_transpose conv_transpose2d
an fr.op of your own, with its fr.kernel: ConvTranspose2d ctc_loss CTCLoss interpolate
an fr.op of your own, with its fr.kernel: Upsample upsample grid_sample unfold fold
an fr.op of your own, with its fr.kernel: local_response_norm lrn max_unpool2d in_top_k
"""
