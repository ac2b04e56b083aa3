import torch

from isokron.linalg import on_host, sent, surely_all


def test_values_of_many_tensors_are_read_in_order() -> None:
    tensors = [torch.tensor(3), torch.tensor([[1.5, 2.0], [-1.0, 0.0]]), torch.zeros(0)]
    assert on_host(tensors) == [[3.0], [1.5, 2.0, -1.0, 0.0], []]
    assert on_host([]) == []


def test_a_shortcut_is_taken_only_for_conditions_known_on_the_host() -> None:
    assert surely_all(torch.tensor([True, True]))
    assert not surely_all(torch.tensor([True, False]))
    assert not surely_all(torch.ones(2, dtype=torch.bool, device="meta"))
    assert sent(torch.ones(2), torch.device("meta")).device.type == "meta"
