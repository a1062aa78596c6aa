"""Operations of torch.nn's layers and losses."""
