package templates

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// certificate is that of registries on the test's internet. The stack trusts it from its start on.
var certificate tls.Certificate

// trust makes the certificate, and has the daemons that are started from now on trust it. What they read of it when they need it is in
// no directory, but in memory of this process.
func trust() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{testhost.Server.AsSlice()}, NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	certificate = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	fd, err := unix.MemfdCreate("authorities", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	if _, err := unix.Write(fd, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})); err != nil {
		return err
	}
	return os.Setenv("SSL_CERT_FILE", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd))
}

// serveRegistry has a registry be at those ports of the test's server.
func serveRegistry(t *testing.T, ports ...string) {
	t.Helper()
	srv := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0))), ReadHeaderTimeout: time.Minute}
	t.Cleanup(func() { srv.Close() })
	for _, port := range ports {
		l, err := s.Host.Internet.Listen("tcp4", net.JoinHostPort(testhost.Server.String(), port))
		must(t, err)
		go func() { _ = srv.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}})) }()
	}
}

// TestRegistry: a template is pushed, deleted, and comes back by another name: with what runs in it, from a registry that is trusted,
// and otherwise with its disk alone. Sandboxes of both have what was on its disk, and its command.
func TestRegistry(t *testing.T) {
	if s == nil {
		t.Skip("SKIPPED: TestSteps has a stack")
	}
	_, trusted, _ := net.SplitHostPort(stack.TrustedRegistry)
	const other = "5001"
	serveRegistry(t, trusted, other)
	ok := func(args ...string) (stdout, stderr string) {
		t.Helper()
		began := time.Now()
		r := s.Cube(args...)
		if r.Err != nil {
			t.Fatalf("cube %s: %v", strings.Join(args, " "), r.Err)
		}
		t.Logf("cube %s: %.1f s\n%s", strings.Join(args, " "), time.Since(began).Seconds(), r.Stderr)
		return strings.TrimSpace(r.Stdout), r.Stderr
	}
	key, _ := ok("key", "create", "--team", "default")
	ok("template", "build", "--cpus", "1", "--memory", "256", "--step", "echo kept >/kept; useradd -m worker",
		"--run", "date +%s%N >~/begun; exec sleep 4321", "--ready", "[ -s ~/begun ]", "origin", stack.Image)
	at, _ := ok("template", "push", "origin", stack.TrustedRegistry+"/team/origin:v1")
	if !strings.HasPrefix(at, stack.TrustedRegistry+"/team/origin@sha256:") {
		t.Errorf("it was pushed to %s", at)
	}
	if again, said := ok("template", "push", "origin", stack.TrustedRegistry+"/team/origin:v2"); again != at || !strings.Contains(said, "0B in ") {
		t.Errorf("pushed again it is %s: %s", again, said)
	}
	begun := says(t, key, "origin")
	ok("template", "rm", "origin")

	_, said := ok("template", "pull", stack.TrustedRegistry+"/team/origin:v2", "whole:v1")
	if strings.Contains(said, "only its disk") {
		t.Error(said)
	}
	if got := says(t, key, "whole:v1"); got != begun {
		t.Errorf("what runs in it has begun at %s, not %s", got, begun)
	}
	_, said = ok("template", "pull", "--public", net.JoinHostPort(testhost.Server.String(), other)+strings.TrimPrefix(at, stack.TrustedRegistry))
	if !strings.Contains(said, "only its disk is taken") {
		t.Error(said)
	}
	if got := says(t, key, "origin"); got == begun || len(got) != len(begun) {
		t.Errorf("what runs in it has begun at %q", got)
	}
	if r := s.Cube("template", "pull", stack.TrustedRegistry+"/team/none:1"); r.Err == nil || !strings.Contains(r.Stderr, "the registry doesn't have it") {
		t.Errorf("what isn't there: %+v", r)
	}
	if r := s.Cube("template", "push", "whole:v1", "127.0.0.1:1/a:1"); r.Err == nil || !strings.Contains(r.Stderr, "127.0.0.1:1 is of this host") {
		t.Errorf("to this host: %+v", r)
	}
	ok("template", "rm", "whole", "origin")
}

// says sees that a sandbox of a template has what is on its disk and runs its command, and returns when that has begun.
func says(t *testing.T, key, template string) (begun string) {
	t.Helper()
	cmd := s.Command("cube", "batch", "--template", template, "--count", "1", "--json", "--",
		`cat /kept; id -un worker; for p in /proc/[0-9]*; do [ "$(tr '\0' ' ' <$p/cmdline)" != 'sleep 4321 ' ] || echo runs; done; echo "begun $(cat ~/begun)"`)
	cmd.Env = append(cmd.Env, "CUBE_API_URL=http://"+s.Config.API.Listen.String(), "CUBE_API_KEY="+key)
	r := s.Run(cmd, nil)
	before, after, found := strings.Cut(r.Stdout, `kept\nworker\nruns\nbegun `)
	if r.Err != nil || !found {
		t.Fatalf("%s: %s%s, %v", template, before, r.Stderr, r.Err)
	}
	begun, _, _ = strings.Cut(after, `\n`)
	return begun
}
