"""What NumPy, PyTorch, TensorFlow and JAX call things, and what flowrt has for each.

Law: words alone. Each line of a page says what to write here, then what others call that; ``NAME`` stands for the very
name. What one page does not have another may: `BEHIND`.
"""

from flowrt.base.elsewhere import functions, layers, tensors

PAGES = {
    "fr": functions.PAGE,
    "fr.nn": layers.PAGE,
    "a tensor": tensors.PAGE,
    "fr.random": """
        fr.random.normal(shape, mean, stddev): randn standard_normal gauss
        fr.random.uniform(shape, low, high): rand random random_sample
        fr.random.normal(shape, seed=1), for each op has its own seed: seed manual_seed PRNGKey key set_seed default_rng
        fr.random.uniform(shape) < p: bernoulli
        fr.astype(fr.random.uniform(shape, low, high), "int64"): randint integers random_integers
        fr.clip(fr.random.normal(shape), -2, 2): truncated_normal
        fr.random.normal(shape, mean, stddev): stateless_normal glorot_normal he_normal xavier_normal kaiming_normal
        fr.random.uniform(shape, -limit, limit): glorot_uniform he_uniform xavier_uniform kaiming_uniform
        fr.random.uniform(shape, low, high): stateless_uniform
        fr.random.normal(fr.shape_of(x)): randn_like normal_like
        fr.random.uniform(fr.shape_of(x)): rand_like
        fr.exp(fr.random.normal(shape)): lognormal
        -fr.log(1 - fr.random.uniform(shape)): exponential
        -fr.log(-fr.log(fr.random.uniform(shape))): gumbel
        fr.argmax(logits - fr.log(-fr.log(fr.random.uniform(shape))), -1): categorical multinomial choice
        fr.sign(fr.random.uniform(shape) - 0.5): rademacher
        fr.random.normal(shape, seed=1), for each op has its own seed: Generator RandomState split fold_in key_data
        fr.data, which shuffles what is read: shuffle permutation randperm
        an fr.op of your own, with its fr.kernel: gamma beta poisson binomial dirichlet laplace
    """,
    "fr.optim": """
        fr.optim.AdaGrad(lr): Adagrad AdagradOptimizer
        fr.optim.SGD(lr): sgd GradientDescentOptimizer GradientDescent
        fr.optim.Momentum(lr, momentum): MomentumOptimizer momentum Nesterov
        fr.optim.RMSProp(lr): RMSprop rmsprop RMSPropOptimizer
        fr.optim.Adam(lr): adam AdamOptimizer
        fr.optim.AdamW(lr): adamw
        fr.optim.clip_by_global_norm(gradients, limit): clip_grad_norm_ clip_by_norm
        fr.optim.AdaGrad(lr): adagrad
        a tensor for lr, computed in the graph: lr_scheduler schedules exponential_decay cosine_decay_schedule
        a tensor for lr, computed in the graph: polynomial_decay piecewise_constant_schedule ExponentialDecay
        fr.clip(gradient, -limit, limit): clip clip_grad_value_
        fr.optim.clip_by_global_norm(gradients, limit): global_norm
        optimizer.minimize(loss): apply_updates zero_grad step
        a class of your own, of fr.optim.Optimizer: Adadelta Adamax NAdam Nadam RAdam Rprop LBFGS Lion Adafactor Ftrl
        a class of your own, of fr.optim.Optimizer: lamb lion adafactor adamax lars SparseAdam ASGD
    """,
    "fr.train": """
        fr.train.Replicated: DistributedDataParallel MirroredStrategy ParameterServerStrategy SyncReplicasOptimizer
        fr.train.FirstOf(m): BackupWorkers
        fr.Checkpoints(url): Checkpoint CheckpointManager Saver
        fr.optim.NAME: SGD Momentum AdaGrad RMSProp Adam AdamW
    """,
}

BEHIND = {"fr": "fr.nn", "fr.nn": "fr", "fr.random": "fr", "a tensor": "fr"}
"""Where else a name is looked for."""
