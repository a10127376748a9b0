"""Models and tensors that move between the CPU and pretended GPUs."""

from test_pretend import pretended


def test_a_model_moves_to_the_gpu_while_a_graph_uses_its_parameters(tmp_path):
    pretended(
        """
        plain = torch.nn.Linear(2, 1)
        plain(torch.ones(1, 2)).sum().backward()
        used = plain(torch.ones(1, 2))
        plain.cuda()
        assert plain.weight.is_cuda and plain.bias.is_cuda and isinstance(plain.weight, torch.nn.Parameter)
        normed = torch.nn.utils.weight_norm(torch.nn.Conv1d(1, 1, 3)).cuda()  # its weight is computed from parameters
        normed(torch.ones(1, 1, 4, device="cuda")).sum().backward()
        assert normed.weight_g.grad.is_cuda and normed.bias.grad.is_cuda
        """,
        tmp_path,
    )


def test_tensors_change_their_device_and_their_type_also_in_inference_mode(tmp_path):
    pretended(
        """
        def is_one(tensor, device, dtype):
            return (str(tensor.device), tensor.dtype) == (device, dtype)

        for mode in (False, True):
            with torch.inference_mode(mode):
                x, c = torch.ones(3, device="cuda"), torch.ones(3)
                assert torch.as_tensor(x) is x and x.to("cuda") is x
                assert is_one(torch.as_tensor(x, dtype=torch.float64, device="cuda"), "cuda:0", torch.float64)
                assert is_one(torch.as_tensor(x, device="cpu"), "cpu", torch.float32)
                assert is_one(x.to("cuda:1"), "cuda:1", torch.float32)
                assert is_one(x.to("cuda:1", torch.float64), "cuda:1", torch.float64)
                assert is_one(x.to("cpu", torch.float64), "cpu", torch.float64)
                assert is_one(x.to(c), "cpu", torch.float32) and is_one(c.double().to(x), "cuda:0", torch.float32)
                assert is_one(x.type_as(c), "cpu", torch.float32) and is_one(c.type_as(x), "cuda:0", torch.float32)
                assert is_one(c.type("torch.cuda.DoubleTensor"), "cuda:0", torch.float64)
        """,
        tmp_path,
    )


def test_parameters_keep_what_the_program_has_set_on_them_when_the_model_moves(tmp_path):
    pretended(
        """
        import weakref

        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for number, each in enumerate(model.parameters()):
            each.number = number
        known = [weakref.ref(each) for each in model.parameters()]  # as an average of them may have
        model.to("cuda")
        before = [each() for each in known]
        for device in ("cuda", "cuda:1", "cpu", "cuda"):
            model.to(device)
            assert [each.number for each in model.parameters()] == [0, 1, 2, 3]
            assert all(one is other for one, other in zip(before, model.parameters()))
            assert {each.device.type for each in before} == {torch.device(device).type}
        """,
        tmp_path,
    )


def test_a_parameter_of_an_own_class_stays_one(tmp_path):
    pretended(
        """
        class Flat(torch.nn.Parameter):
            def __new__(cls, data, name):
                return super().__new__(cls, data)

            def __init__(self, data, name):
                self.name_of_flat = name

            def shown(self):
                return self.name_of_flat

        made, module = Flat(torch.ones(2, device="cuda"), "made"), torch.nn.Module()
        assert isinstance(made, Flat) and made.is_cuda and made.shown() == "made"
        module.flat = Flat(torch.ones(2), "moved")
        for device in ("cuda", "cpu", "cuda:1"):
            module.to(device)
            assert isinstance(module.flat, Flat) and module.flat.shown() == "moved"
            assert module.flat.device.type == torch.device(device).type
            (2 * module.flat).sum().backward()
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.step()
        assert module.flat.shown() == "moved" and module.flat.detach().max() < 1
        """,
        tmp_path,
    )


def test_the_gradient_of_a_copy_on_the_cpu_returns_to_the_gpu_of_its_source(tmp_path):
    pretended(
        """
        model = torch.nn.Linear(3, 2).to("cuda:1")
        model(torch.ones(2, 3, device="cuda:1")).cpu().pow(2).mean().backward()
        inputs = torch.ones(3, device="cuda:1", requires_grad=True)
        copied, kept = torch.zeros(3), torch.ones(3, requires_grad=True)
        copied.copy_(2 * inputs)
        (copied * kept).sum().backward()
        devices = {str(each.grad.device) for each in (*model.parameters(), inputs)}
        assert devices == {"cuda:1"} and inputs.grad.tolist() == [2, 2, 2] and not kept.grad.is_cuda
        """,
        tmp_path,
    )


def test_new_tensors_may_be_on_a_gpu_by_default(tmp_path):
    pretended(
        """
        torch.distributed.init_process_group("nccl", "tcp://127.0.0.1:0", rank=0, world_size=1)
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        torch.distributed.all_reduce(one := torch.ones(1))
        assert one.is_cuda
        torch.distributed.destroy_process_group()
        """,
        tmp_path,
    )
