namespace zero::cuda {}
