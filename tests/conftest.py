"""What every test shares."""

import torch

# Small models wait for each other's threads where other work shares the cores; bits do not depend on the machine either.
torch.set_num_threads(1)
