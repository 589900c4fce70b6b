// Package attach gives pods their places in the host's network: the tap for the machine, and what the guest is told of it.
// The shim is the only one to claim and release places; what is open of them is the business of CNI plugins, but for pods that
// bring settings of their own.
package attach

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/spec"
)

// Network implements pod.Network with the network that the configuration is about, in the network namespace of the shim,
// which is that of whoever has brought the network up.
type Network struct{}

var _ pod.Network = Network{}

// Attach implements pod.Network. A pod that brings settings has a network by them. One that says nothing has a place that a
// CNI plugin opens, before or later, if there is a network at all: else it has no card, as if it had asked for none.
func (Network) Attach(ctx context.Context, cfg *config.Config, p network.Pod, asked spec.Network, held bool, log *slog.Logger) (*pod.Attachment, error) {
	if asked.None {
		return nil, nil
	}
	n := network.New(cfg)
	a, err := n.Claim(ctx, p)
	if notUp := errdefs.IsUnavailable(err) && !errors.Is(err, context.DeadlineExceeded); notUp && asked.Settings == nil {
		log.Info("the machine has no network card", "reason", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if held {
		if err := n.Hold(ctx, p); err != nil {
			return nil, err
		}
	}
	tap, err := n.OpenTap(ctx, p)
	if err != nil {
		return nil, err
	}
	return &pod.Attachment{
		Tap:   tap,
		Guest: guest(a),
		Open: func(ctx context.Context) error {
			if asked.Settings != nil {
				if _, err := n.Open(ctx, asked.Settings.Request(p)); err != nil {
					return err
				}
			}
			if !held {
				return nil
			}
			return n.Renew(ctx, p)
		},
		Hold: func(ctx context.Context, tap *os.File) error {
			return errors.Join(n.Hold(ctx, p), network.Drain(tap))
		},
		Resume: func(ctx context.Context) error { return n.Resume(ctx, p) },
		Renew:  func(ctx context.Context) error { return n.Renew(ctx, p) },
		Follow: func(ctx context.Context, changed func(mtu uint32)) error {
			return follow(ctx, a.Tap, a.MTU, changed)
		},
	}, nil
}

// guest is what the guest's card has: in each guest the same, so that a restored one has nothing to learn.
func guest(a *network.Attachment) *api.Network {
	return &api.Network{
		Address:     network.GuestPrefix.String(),
		Gateway:     network.GuestGateway.String(),
		GatewayMac:  gateway.MAC,
		Mtu:         uint32(a.MTU),
		Nameservers: []string{network.GuestGateway.String()},
	}
}

// Release implements pod.Network.
func (Network) Release(ctx context.Context, cfg *config.Config, p network.Pod) error {
	return network.New(cfg).Release(ctx, p)
}
