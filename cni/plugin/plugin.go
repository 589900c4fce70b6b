package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
)

// Main does what the environment and standard input ask for, and exits with an error as the specification has it.
func Main() {
	skel.PluginMainFuncs(skel.CNIFuncs{
		Add:    coded(add),
		Del:    coded(del),
		Check:  coded(check),
		GC:     coded(gc),
		Status: coded(status),
	}, versions, "CNI plugin cube-cni: the network of Cube's microVMs")
}

// versions are those with results that say all that there is to say.
var versions = version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0")

// The plugin's own error codes.
const (
	codeExists uint = 100 + iota // the container has an interface, or somebody else one of its ports of the host
	codeBroken                   // what was added isn't in force
)

// coded gives the errors of a command codes of the specification's.
func coded(command func(context.Context, *skel.CmdArgs, *netConf, *config.Config) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		conf, err := parse(args.StdinData)
		if err != nil {
			return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
		}
		cfg, err := config.Load(conf.CubeConfig)
		if err != nil {
			return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
		}
		err = command(context.Background(), args, conf, cfg)
		var hasCode *types.Error
		if err == nil || errors.As(err, &hasCode) {
			return err
		}
		return types.NewError(code(err), err.Error(), "")
	}
}

func code(err error) uint {
	switch {
	case errdefs.IsInvalidArgument(err):
		return types.ErrInvalidNetworkConfig
	case errdefs.IsUnavailable(err), errdefs.IsResourceExhausted(err):
		return types.ErrTryAgainLater
	case errdefs.IsNotFound(err):
		return types.ErrUnknownContainer
	case errdefs.IsAlreadyExists(err), errdefs.IsConflict(err):
		return codeExists
	case errdefs.IsFailedPrecondition(err):
		return codeBroken
	}
	return types.ErrInternal
}

func add(ctx context.Context, args *skel.CmdArgs, conf *netConf, cfg *config.Config) (err error) {
	if err := conf.refuse(); err != nil {
		return err
	}
	r := network.Request{ID: args.ContainerID, Network: conf.Name, IfName: args.IfName, NetNS: args.Netns}
	if r.Policy, err = conf.policy(); err != nil {
		return err
	}
	if r.TX, r.RX, err = conf.limits(); err != nil {
		return err
	}
	if r.Ports, err = conf.ports(); err != nil {
		return err
	}
	before, err := previous(conf)
	if err != nil {
		return err
	}
	n := network.New(cfg)
	a, err := n.Open(ctx, r)
	if err != nil {
		return err
	}
	return types.PrintResult(result(before, a, conf, cfg), conf.CNIVersion)
}

// result adds an attachment to what the plugins before have made.
func result(before *types100.Result, a *network.Attachment, conf *netConf, cfg *config.Config) *types100.Result {
	r := before
	if r == nil {
		r = &types100.Result{}
	}
	r.CNIVersion = types100.ImplementedSpecVersion
	gw := net.IP(cfg.Network.Gateway().AsSlice())
	r.Interfaces = append(r.Interfaces,
		&types100.Interface{Name: a.Tap, Mtu: a.MTU},
		&types100.Interface{Name: a.IfName, Mac: network.GuestMAC.String(), Mtu: a.MTU, Sandbox: a.NetNS})
	r.IPs = append(r.IPs, &types100.IPConfig{
		Interface: types100.Int(len(r.Interfaces) - 1),
		Address:   net.IPNet{IP: a.Address.AsSlice(), Mask: net.CIDRMask(32, 32)},
		Gateway:   gw,
	})
	r.Routes = append(r.Routes, &types.Route{Dst: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, GW: gw})
	r.DNS = conf.DNS
	r.DNS.Nameservers = []string{gw.String()}
	return r
}

// previous is nil where no plugin was before.
func previous(conf *netConf) (*types100.Result, error) {
	if conf.RawPrevResult == nil {
		return nil, nil
	}
	if err := version.ParsePrevResult(&conf.PluginConf); err != nil {
		return nil, fmt.Errorf("prevResult: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	r, err := types100.NewResultFromResult(conf.PrevResult)
	if err != nil {
		return nil, fmt.Errorf("prevResult: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return r, nil
}

func del(ctx context.Context, args *skel.CmdArgs, conf *netConf, cfg *config.Config) error {
	return network.New(cfg).Close(ctx, args.ContainerID, conf.Name, args.IfName)
}

func check(ctx context.Context, args *skel.CmdArgs, conf *netConf, cfg *config.Config) error {
	before, err := previous(conf)
	if err != nil {
		return err
	}
	if before == nil {
		return fmt.Errorf("prevResult is missing: %w", errdefs.ErrInvalidArgument)
	}
	var remembered []netip.Addr
	for _, ip := range before.IPs {
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			remembered = append(remembered, a.Unmap())
		}
	}
	return network.New(cfg).Check(ctx, args.ContainerID, conf.Name, args.IfName, remembered)
}

func gc(ctx context.Context, _ *skel.CmdArgs, conf *netConf, cfg *config.Config) error {
	keep := make(map[types.GCAttachment]bool, len(conf.ValidAttachments))
	for _, a := range conf.ValidAttachments {
		keep[a] = true
	}
	return network.New(cfg).GC(ctx, conf.Name, func(id, ifName string) bool {
		return keep[types.GCAttachment{ContainerID: id, IfName: ifName}]
	})
}

func status(ctx context.Context, _ *skel.CmdArgs, _ *netConf, cfg *config.Config) error {
	err := network.New(cfg).Status(ctx)
	switch {
	case errdefs.IsUnavailable(err), errdefs.IsResourceExhausted(err):
		return types.NewError(types.ErrPluginNotAvailable, err.Error(), "")
	case errdefs.IsFailedPrecondition(err):
		return types.NewError(types.ErrLimitedConnectivity, err.Error(), "")
	}
	return err
}
