package pod

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/spec"
)

// networkLimit bounds the wait for the network's part of a machine, which is ready made, and for its end.
const networkLimit = 10 * time.Second

// Network is where pods have their places in the host's network.
type Network interface {
	// Attach returns the pod's place, for the machine that is about to be made; nil for a pod that is to have none. A machine
	// that goes on from a snapshot has it held: nothing passes before Attachment.Open, whoever has opened it.
	Attach(ctx context.Context, cfg *config.Config, pod network.Pod, asked spec.Network, held bool, log *slog.Logger) (*Attachment, error)
	// Release gives the place back, once no machine has the tap, or after an Attach that failed. That there is nothing is
	// fine.
	Release(ctx context.Context, cfg *config.Config, pod network.Pod) error
}

// Attachment is a pod's place in the network.
type Attachment struct {
	// Tap is vmm.Request's. The pod closes it, and the machine then has the only descriptor that is handed on: its end is
	// to be seen by the tap's carrier, whoever ends it.
	Tap *os.File
	// Guest is what the machine is told.
	Guest *api.Network
	// Open opens it, unless a CNI plugin does that. It is called when the guest has its identity and nothing of a workload
	// runs in it yet.
	Open func(ctx context.Context) error
	// Hold has nothing pass until Resume or Renew, and empties the tap's queue, of which the caller has a descriptor. It can be
	// called again.
	Hold func(ctx context.Context, tap *os.File) error
	// Resume lets packets pass again, for the same machine; it can be called again. Renew does it for another one, which has
	// none of the connections of the one before.
	Resume, Renew func(ctx context.Context) error
	// Follow calls changed with each other MTU that the guest is to have, until ctx ends, which is no error.
	Follow func(ctx context.Context, changed func(mtu uint32)) error
}

// name is the pod's name for the network.
func (p *Pod) name() network.Pod { return network.Pod{Namespace: p.env.Namespace, ID: p.env.ID} }

// attach gets the pod's place, if it is to have one.
func (k *making) attach(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.Timeout(networkLimit))
	defer cancel()
	if k.attached, err = k.env.Network.Attach(ctx, k.cfg, k.name(), k.network, k.from != nil, k.log); err != nil {
		return fmt.Errorf("attach the pod to the network: %w", err)
	}
	return nil
}

// open opens it, if there is one.
func (k *making) open(ctx context.Context) error {
	if k.attached == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, k.cfg.Timeout(networkLimit))
	defer cancel()
	if err := k.attached.Open(ctx); err != nil {
		return fmt.Errorf("open the pod's network: %w", err)
	}
	return nil
}

// detach gives the place back that a machine of cfg's has had.
func (k *making) detach(cfg *config.Config) error {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(networkLimit))
	defer cancel()
	if err := k.env.Network.Release(ctx, cfg, k.name()); err != nil {
		return fmt.Errorf("detach the pod from the network: %w", err)
	}
	return nil
}

// follow has the guest's network card follow the host's network until the machine is down.
func (k *making) follow(v *vm) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		<-v.down
		cancel()
	}()
	err := k.attached.Follow(ctx, func(mtu uint32) {
		n := proto.CloneOf(k.attached.Guest)
		n.Mtu = mtu
		if err := k.tell(ctx, n); err != nil && ctx.Err() == nil {
			k.log.Warn("the guest couldn't be told its network's MTU", "mtu", mtu, "error", err)
		}
	})
	if err != nil && !v.ended.Load() && !v.isDown() { // with the machine the tap goes
		k.log.Warn("the guest isn't told any more when its network's MTU changes", "error", err)
	}
}
