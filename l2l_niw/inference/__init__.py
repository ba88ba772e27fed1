"""The paper's mathematics, on lists of tensors: one per parameter, of one episode or, (B, ...), of several.

| file | in the paper |
|---|---|
| `prior.py`, `wishart.py` | q(phi) = NIW(m_0, V_0, n_0), Eq. 6; its mode, Eq. 17 |
| `chain.py`, `curvature/` | the quadratic approximation of an episode's loss by SGLD, Eq. 12 |
| `closed_form.py` | q_i, Eq. 13 |
| `objective.py`, `meta_gradient.py` | the expected KL, Eq. 10, the objective, Eq. 14, and its gradient in L_0 |
| `last_layer.py` | for which weights steps keep their graph |
| `latent.py`, `laplace.py`, `likelihood.py` | Eq. 13 with A in full, or V_0 of low rank, in the prior's coordinates |
| `latent_posterior.py`, `latent_gradient.py` | its steps and predictions; the gradient in L_0 |
| `mixture.py` | several NIWs: responsibilities, the objective, a posterior of several modes |
| `elbo.py`, `gaussian.py` | meta-test inference and prediction, Eq. 16 and 18 |
"""
