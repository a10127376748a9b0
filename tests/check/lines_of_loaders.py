"""Programs for ``test_origins.py``: the causes are in loaders, samplers and data sets."""

PROGRAMS = {
    "of-rank:seed": """
        def main(args, rank):
            args.seed = args.seed + rank
            seed = args.seed + rank  # cause
            sampler = DistributedSampler(data, seed=seed)
            for batch in DataLoader(data, sampler=sampler):
                model(batch)  # seen
    """,
    "of-rank:seed ": """
        def main(args, rank):
            args.seed += rank  # cause
            sampler = DistributedSampler(data, seed=args.seed)
            for batch in DataLoader(data, sampler=sampler):
                model(batch)  # seen
    """,
    "of-rank:rank": """
        def main(world_size):
            part = int(os.environ.get("RANK", 0))  # cause
            sampler = DistributedSampler(data, num_replicas=world_size, rank=part)
            for batch in DataLoader(data, sampler=sampler):
                model(batch)  # seen
    """,
    "undivided": """
        def main(model):
            trainer = Trainer(
                devices=2,
                use_distributed_sampler=False,  # cause
            )
            trainer.fit(model)  # seen
    """,
    "loader:uncalled ": """
        def epoch_of(model, loader):
            for batch in loader:
                model(batch)  # seen

        def main(model, data):
            loader = DataLoader(data, sampler=DistributedSampler(data))
            for epoch in range(3):  # cause
                epoch_of(model, loader)
    """,
    "loader:uncalled  ": """
        def main(model, data):
            loader = DataLoader(data, sampler=DistributedSampler(data))
            while True:  # cause
                for batch in loader:  # seen
                    model(batch)
    """,
    "loader:uncalled": """
        def main(sampler):
            for epoch in range(3):
                if hasattr(sampler, "set_epoch"):  # cause
                    sampler.set_epoch(epoch)
                train(sampler)  # seen
    """,
    "in-worker": """
        def begin(worker):
            print(worker)
            torch.manual_seed(worker)  # cause

        def main(data):
            for batch in DataLoader(data, num_workers=2, worker_init_fn=begin):  # seen
                train(batch)
    """,
    "stream": """
        class Stream(IterableDataset):
            def __iter__(self):  # seen
                worker = get_worker_info().id
                for number in range(self.rank + worker, 100):  # cause
                    yield self.documents[number]
    """,
    "stream:share": """
        class Stream(IterableDataset):
            def __iter__(self):  # seen
                rng = default_rng([self.seed, self.rank])
                rng.shuffle(self.documents)
                for document in self.documents:  # cause
                    yield document
    """,
    "stream:share ": """
        class Stream(IterableDataset):
            def __iter__(self):  # seen
                rng = default_rng([self.seed, self.rank])
                for document in rng.permutation(self.documents[self.rank :: self.ranks]):  # cause
                    for line in document:
                        yield line
    """,
    "undealt": """
        class Balanced(Sampler):
            def __iter__(self):
                drawn = torch.multinomial(self.weights, len(self))
                return iter(drawn.tolist())  # cause

        def main(model, data):
            loader = DataLoader(data, sampler=Balanced(data.weights))
            for batch in loader:  # seen
                model(batch)
    """,
    "undealt:": """
        class Balanced(Sampler):
            def __iter__(self):
                drawn = torch.multinomial(self.weights, len(self))
                return iter(drawn.tolist()[self.rank :: self.ranks])

        def main(model, data):
            loader = DataLoader(data, sampler=Balanced(data.weights))
            for batch in loader:  # seen
                model(batch)
    """,
    "dealt": """
        class Buckets(Sampler):
            def __iter__(self):
                order = torch.randperm(len(self.batches)).tolist()
                return iter([self.batches[each] for each in order[self.rank :: self.world_size]])  # cause

        def main(model, data):
            loader = DataLoader(data, batch_sampler=Buckets(data.lengths))
            for batch in loader:  # seen
                model(batch)
    """,
    "dealt:by-the-data-set": """
        class Stream(IterableDataset):
            def __iter__(self):
                yield from self.documents[self.rank :: self.world_size]  # cause

        def main(model, documents):
            data = Stream(documents)
            for batch in tqdm(DataLoader(data, 8)):  # seen
                model(batch)
    """,
    "dealt:next-of-a-stream": """
        class Stream(IterableDataset):
            def __iter__(self):
                info = get_worker_info()
                for number in order[info.id :: info.num_workers]:  # cause
                    yield self.documents[number]

        def main(model, documents):
            batches = iter(DataLoader(Stream(documents), 8))
            while True:
                batch = next(batches)
                model(batch).backward()  # seen
    """,
    "dealt:lightning": """
        class Stream(IterableDataset):
            def __iter__(self):
                for number in range(self.rank, len(self.documents), self.world_size):  # cause
                    yield self.documents[number]

        class Data(LightningDataModule):
            def train_dataloader(self):
                return DataLoader(Stream(self.documents), 8)

        trainer.fit(Net(), Data())  # seen
    """,
}
