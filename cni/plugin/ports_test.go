package plugin

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestPorts: the capability portMappings, with the names that runtimes give its parts.
func TestPorts(t *testing.T) {
	n := newNode(t)
	stop := n.Daemon()
	ctx := t.Context()
	box := network.Pod{Namespace: "default", ID: "box"}
	_, err := n.Claim(ctx, box)
	testnet.Must(t, err)
	rt := n.rt("default-box")
	rt.CapabilityArgs = map[string]any{"portMappings": []any{
		// As go-cni writes them, for containerd and nerdctl.
		map[string]any{"HostPort": 8080, "ContainerPort": 80, "Protocol": "TCP", "HostIP": ""},
		map[string]any{"hostPort": 8081, "containerPort": 80, "hostIP": "127.0.0.1"},
		map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "udp", "hostIP": "0.0.0.0"},
	}}
	_, err = n.cni.AddNetworkList(ctx, n.list, rt)
	testnet.Must(t, err)
	a, err := n.Get(ctx, "default-box")
	testnet.Must(t, err)
	if got := fmt.Sprint(a.Ports); got != "[0.0.0.0:8080/tcp 127.0.0.1:8081/tcp 0.0.0.0:8080/udp]" {
		t.Error(got)
	}
	guest, off := n.Guest(box)
	guest.Do(t, func() error {
		l, err := net.Listen("tcp4", ":80")
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, "hello")
				c.Close()
			}
		}()
		return nil
	})
	for _, at := range []string{"127.0.0.1:8080", "198.51.100.2:8080", "127.0.0.1:8081"} {
		c, err := net.Dial("tcp4", at)
		testnet.Must(t, err)
		if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
			t.Errorf("%s says %q, %v", at, b, err)
		}
		c.Close()
	}
	testnet.Must(t, n.cni.CheckNetworkList(ctx, n.list, rt))

	other := n.rt("default-other")
	other.CapabilityArgs = map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}
	_, err = n.cni.AddNetworkList(ctx, n.list, other)
	n.expect("a port that another container has", err, codeExists)
	l, err := net.Listen("tcp4", "127.0.0.1:9090")
	testnet.Must(t, err)
	defer l.Close()
	other.CapabilityArgs = map[string]any{"portMappings": []any{map[string]any{"hostPort": 9090, "containerPort": 80, "protocol": "tcp"}}}

	// What isn't served is told of while a daemon runs, and what is left of the container goes without one.
	stop(false)
	testnet.Must(t, n.cni.CheckNetworkList(ctx, n.list, rt))
	taken, err := net.Listen("tcp4", "127.0.0.1:8081")
	testnet.Must(t, err)
	defer taken.Close()
	stop = n.Daemon()
	_, err = n.cni.AddNetworkList(ctx, n.list, other)
	n.expect("a port that another process has", err, codeExists)
	n.expect("check with a port that another process has taken", n.cni.CheckNetworkList(ctx, n.list, rt), codeBroken)
	stop(true)
	_, err = n.cni.AddNetworkList(ctx, n.list, other)
	n.expect("ports without a daemon", err, types.ErrTryAgainLater)
	testnet.Must(t, n.cni.DelNetworkList(ctx, n.list, rt))
	off()
	testnet.Must(t, n.Release(ctx, box))
	n.Daemon()
	_, err = n.cni.AddNetworkList(ctx, n.list, n.rt("default-other"))
	testnet.Must(t, err)
	testnet.Must(t, n.cni.DelNetworkList(ctx, n.list, n.rt("default-other")))
	c, err := net.Dial("tcp4", "127.0.0.1:8080")
	if err == nil {
		c.Close()
		t.Error("the port of a container that is gone is open")
	}
	if a, err := n.Get(ctx, "default-other"); err == nil {
		t.Errorf("%+v is left", a)
	}
}

// TestKilledPorts: the plugin is killed anywhere, and after GC the ports can be had.
func TestKilledPorts(t *testing.T) {
	n := newNode(t)
	n.Daemon()
	ctx := t.Context()
	mapped := map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80}, map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}}}
	live := func(id string) time.Duration {
		rt := n.rt(id)
		rt.CapabilityArgs = mapped
		began := time.Now()
		_, err := n.cni.AddNetworkList(ctx, n.list, rt)
		testnet.Must(t, err)
		took := time.Since(began)
		testnet.Must(t, n.cni.CheckNetworkList(ctx, n.list, rt))
		testnet.Must(t, n.cni.DelNetworkList(ctx, n.list, rt))
		return took
	}
	most := live("first")
	runtime, err := json.Marshal(mapped)
	testnet.Must(t, err)
	stdin := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "cube", "type": "cube-cni", "cubeConfig": %q, "runtimeConfig": %s, %s}`, n.config, runtime, allowAll)
	for i := range 12 {
		cmd := exec.Command(filepath.Join(n.bin, "cube-cni"))
		cmd.Stdin = strings.NewReader(stdin)
		cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", fmt.Sprint("CNI_CONTAINERID=c", i), "CNI_NETNS="+n.pod, "CNI_IFNAME=eth0", "CNI_PATH="+n.bin)
		testnet.Must(t, cmd.Start())
		// Where it is by then is chance, and meant to be.
		time.Sleep(time.Duration(rand.Int64N(int64(most))))
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		testnet.Must(t, n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{}))
		live(fmt.Sprint("after", i))
	}
	for _, dir := range []string{"ports", "addresses", "attachments"} {
		if left, err := os.ReadDir(n.Path(dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}
