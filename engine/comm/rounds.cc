#include "engine/comm/rounds.h"

#include <algorithm>
#include <set>

#include "kernels/check.h"

namespace zero {
namespace {

// Adds memory to a message. Memory side by side is one run.
void Add(const void* data, int64_t bytes, std::vector<MemoryRun>* runs) {
  if (bytes == 0) return;
  char* const begin = const_cast<char*>(static_cast<const char*>(data));
  if (!runs->empty() && runs->back().data + runs->back().bytes == begin) {
    runs->back().bytes += bytes;
  } else {
    runs->push_back({begin, bytes});
  }
}

// Elements of each piece that a round moves.
int64_t ElemsOf(CollectiveKind kind, int64_t bytes, int64_t item,
                int64_t senders, int most_here) {
  int64_t copies = 1;  // of a piece, that one process receives
  if (kind != CollectiveKind::kBroadcast) copies = senders;
  if (kind == CollectiveKind::kReduceScatter) copies *= most_here;
  return std::max(bytes / item / copies, Rounds::kLeastElems);
}

}  // namespace

Rounds::Rounds(const Collective& collective, absl::Span<const int> processes,
               int process, absl::Span<const int> hosts, int64_t bytes)
    : kind_(collective.kind),
      dtype_(collective.dtype),
      root_(collective.root),
      processes_(processes.begin(), processes.end()) {
  const auto here =
      std::equal_range(processes_.begin(), processes_.end(), process);
  first_ = static_cast<int>(here.first - processes_.begin());
  num_here_ = static_cast<int>(here.second - here.first);
  ZERO_CHECK_GT(num_here_, 0) << "rounds: no rank of process " << process;
  int most_here = 0;
  for (auto it = processes_.begin(); it != processes_.end();) {
    const auto end = std::upper_bound(it, processes_.end(), *it);
    most_here = std::max(most_here, static_cast<int>(end - it));
    it = end;
  }
  AddSenders(collective.algorithm == BulkAlgorithm::kHierarchical &&
                     kind_ == CollectiveKind::kReduceScatter
                 ? hosts
                 : absl::Span<const int>());
  const int world = static_cast<int>(processes_.size());
  const int64_t most =
      ElemsOf(kind_, bytes, ItemBytes(), static_cast<int64_t>(senders_.size()),
              most_here);
  int64_t room = 0;
  for (const Window& whole : WholePieces(collective, world)) {
    piece_elems_.push_back(whole.elems);
    for (int64_t begin = 0; begin < whole.elems;) {
      if (room == 0) {
        windows_.emplace_back();
        room = most;
      }
      const int64_t elems = std::min(room, whole.elems - begin);
      windows_.back().push_back({whole.segment, begin, elems, most - room});
      room -= elems;
      begin += elems;
    }
  }
}

// `hosts` is empty where every rank sends.
void Rounds::AddSenders(absl::Span<const int> hosts) {
  const int world = static_cast<int>(processes_.size());
  const auto end_of = [world](const auto& of, int place) {
    int end = place;
    while (end < world && of[end] == of[place]) ++end;
    return end;
  };
  for (int begin = 0; begin < world;) {
    const int end = end_of(processes_, begin);
    // All ranks of its hosts are of this process.
    const bool sums = !hosts.empty() &&
                      (begin == 0 || hosts[begin - 1] != hosts[begin]) &&
                      (end == world || hosts[end] != hosts[end - 1]);
    if (begin == first_) own_begin_ = static_cast<int>(senders_.size());
    while (begin < end) {
      const int next = sums ? end_of(hosts, begin) : begin + 1;
      sender_.resize(next, static_cast<int>(senders_.size()));
      senders_.push_back({begin, next});
      begin = next;
    }
    if (end == first_ + num_here_) {
      own_end_ = static_cast<int>(senders_.size());
    }
  }
}

int64_t Rounds::ItemBytes() const {
  return static_cast<int64_t>(DTypeBytes(dtype_));
}

int64_t Rounds::RoundElems(int round) const {
  const Window& last = windows_[round].back();
  return last.before + last.elems;
}

int64_t Rounds::staging_bytes() const {
  if (windows_.empty()) return 0;
  const int64_t others =
      static_cast<int64_t>(senders_.size()) - (own_end_ - own_begin_);
  const int64_t block = others * RoundElems(0) * ItemBytes();
  if (kind_ == CollectiveKind::kReduceScatter) return block * num_here_;
  return kind_ == CollectiveKind::kReduce && IsHere(root_) ? block : 0;
}

// The address at which the leader receives a rank's data.
char* Rounds::Landing(const Collective& leader, int rank,
                      const Window& window) const {
  const int64_t piece = kind_ == CollectiveKind::kAllGather
                            ? rank * piece_elems_[window.segment]
                            : 0;
  return static_cast<char*>(leader.segments[window.segment].recv) +
         (piece + window.begin) * ItemBytes();
}

// The position of a sender's block for the rank that has `piece`.
int64_t Rounds::StagedElem(int round, int rank, int64_t piece) const {
  int64_t block = sender_[rank];
  if (block >= own_end_) block -= own_end_ - own_begin_;
  if (kind_ == CollectiveKind::kReduceScatter) {
    block = block * num_here_ + piece - first_;
  }
  return block * RoundElems(round);
}

int64_t Rounds::outgoing_bytes() const {
  const int64_t own = own_end_ - own_begin_;
  if (windows_.empty() || own == num_here_) return 0;
  return own * static_cast<int64_t>(processes_.size()) * RoundElems(0) *
         ItemBytes();
}

int64_t Rounds::sent_bytes() const {
  const auto places = static_cast<int64_t>(processes_.size());
  int64_t bytes = 0;  // of a piece
  for (const int64_t elems : piece_elems_) bytes += elems * ItemBytes();
  const auto num_processes = static_cast<int64_t>(
      std::set<int>(processes_.begin(), processes_.end()).size());
  switch (kind_) {
    case CollectiveKind::kAllGather:
      return num_here_ * bytes * (num_processes - 1);
    case CollectiveKind::kReduceScatter:
      return (own_end_ - own_begin_) * bytes * (places - num_here_);
    case CollectiveKind::kReduce:
      return IsHere(root_) ? 0 : num_here_ * bytes;
    case CollectiveKind::kBroadcast:
      return IsHere(root_) ? bytes * (num_processes - 1) : 0;
    case CollectiveKind::kBarrier:
      break;
  }
  return 0;
}

// The address of a sender's sum of a piece.
char* Rounds::Outgoing(int round, int sender, int64_t piece,
                       char* outgoing) const {
  const int64_t world = static_cast<int64_t>(processes_.size());
  return outgoing + ((sender - own_begin_) * world + piece) *
                        RoundElems(round) * ItemBytes();
}

// Each place makes the sums of a share of the pieces.
void Rounds::ForEachSum(int round, int place, char* outgoing,
                        const VisitSumFn& visit) const {
  if (round >= size() || outgoing_bytes() == 0) return;
  for (int piece = 0; piece < static_cast<int>(processes_.size()); ++piece) {
    if (IsHere(piece) || piece % num_here_ != place - first_) continue;
    for (int sender = own_begin_; sender < own_end_; ++sender) {
      for (const Window& window : windows_[round]) {
        visit(senders_[sender].begin, senders_[sender].end, piece, window,
              Outgoing(round, sender, piece, outgoing) +
                  window.before * ItemBytes());
      }
    }
  }
}

std::vector<PeerMessages> Rounds::Messages(
    int round, absl::Span<const Collective* const> all, char* staging,
    char* outgoing) const {
  const Collective& leader = *all[first_];
  const auto sent = [&](int place, int64_t piece, const Window& window,
                        std::vector<MemoryRun>* runs) {
    const int64_t index = piece * piece_elems_[window.segment] + window.begin;
    Add(static_cast<const char*>(all[place]->segments[window.segment].send) +
            index * ItemBytes(),
        window.elems * ItemBytes(), runs);
  };
  std::vector<PeerMessages> messages;
  for (int place = 0; place < static_cast<int>(processes_.size()); ++place) {
    if (IsHere(place)) continue;
    if (messages.empty() || messages.back().process != processes_[place]) {
      messages.push_back({processes_[place], {}, {}});
    }
  }
  for (PeerMessages& peer : messages) {
    const auto there =
        std::equal_range(processes_.begin(), processes_.end(), peer.process);
    const int begin = static_cast<int>(there.first - processes_.begin());
    const int end = static_cast<int>(there.second - processes_.begin());
    const bool root_there = root_ >= begin && root_ < end;
    const int64_t round_bytes = RoundElems(round) * ItemBytes();
    switch (kind_) {
      case CollectiveKind::kAllGather:
        for (int place = first_; place < first_ + num_here_; ++place) {
          for (const Window& window : windows_[round]) {
            sent(place, 0, window, &peer.send);
          }
        }
        for (int place = begin; place < end; ++place) {
          for (const Window& window : windows_[round]) {
            Add(Landing(leader, place, window), window.elems * ItemBytes(),
                &peer.receive);
          }
        }
        break;
      case CollectiveKind::kReduceScatter:
        for (int sender = own_begin_; sender < own_end_; ++sender) {
          for (int piece = begin; piece < end; ++piece) {
            if (outgoing_bytes() > 0) {
              Add(Outgoing(round, sender, piece, outgoing), round_bytes,
                  &peer.send);
              continue;
            }
            for (const Window& window : windows_[round]) {
              sent(senders_[sender].begin, piece, window, &peer.send);
            }
          }
        }
        Add(staging + StagedElem(round, begin, first_) * ItemBytes(),
            (sender_[end - 1] + 1 - sender_[begin]) * num_here_ * round_bytes,
            &peer.receive);
        break;
      case CollectiveKind::kReduce:
        for (int place = first_; root_there && place < first_ + num_here_;
             ++place) {
          for (const Window& window : windows_[round]) {
            sent(place, 0, window, &peer.send);
          }
        }
        if (IsHere(root_)) {
          Add(staging + StagedElem(round, begin, 0) * ItemBytes(),
              (end - begin) * round_bytes, &peer.receive);
        }
        break;
      case CollectiveKind::kBroadcast:
        for (const Window& window : windows_[round]) {
          if (IsHere(root_)) sent(root_, 0, window, &peer.send);
          if (root_there) {
            Add(Landing(leader, root_, window), window.elems * ItemBytes(),
                &peer.receive);
          }
        }
        break;
      case CollectiveKind::kBarrier:
        break;
    }
  }
  return messages;
}

PeerMemory::Block Rounds::Received(int round, const Collective& leader,
                                   const char* staging, int rank, int64_t piece,
                                   const Window& window) const {
  if (kind_ == CollectiveKind::kAllGather ||
      kind_ == CollectiveKind::kBroadcast) {
    return {Landing(leader, rank, window)};
  }
  const Sender& sender = senders_[sender_[rank]];
  return {
      staging + (StagedElem(round, rank, piece) + window.before) * ItemBytes(),
      sender.end - sender.begin};
}

}  // namespace zero
