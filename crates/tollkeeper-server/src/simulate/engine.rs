//! Runs worlds in threads: every batch goes to all threads, and each thread has some of the worlds.
//!
//! The work is not divided by key, because the limits of one request have different keys and are decided together.
//! Results depend neither on the number of threads nor on the size of batches.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;

use anyhow::anyhow;
use tollkeeper::config::Config;

use super::batch::Batch;
use super::filter::{Filter, Only, Sample};
use super::tally::Detail;
use super::worker::{FactReader, Group, Names, Worker};
use super::world::{World, WorldResult};

/// How many batches may wait for a thread.
const AHEAD: usize = 4;

/// A world to be run.
#[derive(Clone, Debug)]
pub struct WorldSpec {
    /// The policy and how facts are read.
    pub config: Config,
    /// Worlds of one group need the same facts.
    pub group: usize,
    /// How much is recorded.
    pub detail: Detail,
}

/// What all worlds have in common.
#[derive(Debug)]
pub struct Engine<'a> {
    /// The config that `--only` and `--sample` refer to.
    pub config: &'a Config,
    /// The conditions of `--only`.
    pub only: &'a [Only],
    /// The part of all keys that is used.
    pub sample: Option<Sample>,
    /// The names that batches refer to.
    pub names: Names,
    /// The most keys of a world.
    pub max_keys: usize,
    /// The number of threads that decide.
    pub threads: usize,
    /// How many top keys a limit has.
    pub top: usize,
}

/// The threads that this machine has for deciding: one core is left for the reader.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).saturating_sub(1).max(1)
}

impl Engine<'_> {
    /// Runs all worlds on the batches that `feed` passes to its argument: the result of each world, the number of
    /// requests that were used, and what `feed` returned.
    pub fn run<T>(
        &self,
        worlds: &[WorldSpec],
        feed: impl FnOnce(&mut dyn FnMut(Batch)) -> anyhow::Result<T>,
    ) -> anyhow::Result<(Vec<WorldResult>, u64, T)> {
        let threads = self.threads.clamp(1, worlds.len().max(1));
        let mut workers = (0..threads).map(|thread| self.worker(worlds, thread, threads));
        let workers = workers.by_ref().collect::<anyhow::Result<Vec<Worker>>>()?;
        thread::scope(|scope| {
            let mut senders = Vec::new();
            let mut running = Vec::new();
            for mut worker in workers {
                let (sender, batches) = sync_channel::<Arc<Batch>>(AHEAD);
                senders.push(sender);
                running.push(scope.spawn(move || {
                    batches.iter().for_each(|batch| worker.decide(&batch));
                    worker.finish(self.top)
                }));
            }
            let fed = feed(&mut |batch| {
                let batch = Arc::new(batch);
                // A thread that has panicked is reported when it is joined.
                senders.iter().for_each(|sender| drop(sender.send(Arc::clone(&batch))));
            });
            drop(senders);
            let mut results = Vec::new();
            let mut used = 0;
            for thread in running {
                let (worlds, requests) = thread.join().map_err(|_| anyhow!("a thread has panicked"))?;
                results.extend(worlds);
                used = requests;
            }
            results.sort_by_key(|(number, _)| *number);
            Ok((results.into_iter().map(|(_, result)| result).collect(), used, fed?))
        })
    }

    /// The worker with every `threads`-th world, beginning with this one.
    fn worker(&self, worlds: &[WorldSpec], first: usize, threads: usize) -> anyhow::Result<Worker> {
        let mut groups: Vec<(&WorldSpec, Vec<(usize, World)>)> = Vec::new();
        for (number, spec) in worlds.iter().enumerate().skip(first).step_by(threads) {
            let world = World::new(spec.config.policy.clone(), self.max_keys, spec.detail);
            match groups.iter_mut().find(|(first, _)| first.group == spec.group) {
                Some((_, worlds)) => worlds.push((number, world)),
                None => groups.push((spec, vec![(number, world)])),
            }
        }
        let groups = groups.into_iter().map(|(spec, worlds)| {
            Ok(Group::new(FactReader::new(&spec.config.http, &spec.config.policy)?, worlds))
        });
        let filter = Filter::new(self.config, self.only, self.sample)?;
        Ok(Worker::new(self.names.clone(), filter, groups.collect::<anyhow::Result<_>>()?))
    }
}
