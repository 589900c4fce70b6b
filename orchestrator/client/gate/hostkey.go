package gate

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/crypto/ssh"
)

// HostAlias is what ssh knows all gates by.
const HostAlias = "cube-sandbox"

const (
	keyFile        = "ssh_host_ed25519_key"
	knownHostsFile = "ssh_known_hosts"
)

// HostKey is the key of the user's gates, which it keeps in dir, made the first time; knownHosts is a file there by which ssh knows
// it. It keeps nothing apart that isn't the user's anyway: it is there for ssh to have nothing to ask.
func HostKey(dir string) (key ssh.Signer, knownHosts string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, "", err
	}
	file := filepath.Join(dir, keyFile)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		if text, err = newKey(); err == nil {
			err = writeOnce(file, text)
		}
		if errors.Is(err, fs.ErrExist) { // another one was faster
			text, err = os.ReadFile(file)
		}
	}
	if err != nil {
		return nil, "", err
	}
	if key, err = ssh.ParsePrivateKey(text); err != nil {
		return nil, "", fmt.Errorf("%s: %w; remove it to have another one made", file, err)
	}
	knownHosts = filepath.Join(dir, knownHostsFile)
	line := HostAlias + " " + string(ssh.MarshalAuthorizedKey(key.PublicKey()))
	if was, err := os.ReadFile(knownHosts); err == nil && string(was) == line {
		return key, knownHosts, nil
	}
	return key, knownHosts, write(knownHosts, []byte(line), os.Rename)
}

func newKey() ([]byte, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	block, err := ssh.MarshalPrivateKey(private, HostAlias)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(block), nil
}

// writeOnce writes a file that isn't there; if it is, the error is fs.ErrExist.
func writeOnce(file string, text []byte) error { return write(file, text, os.Link) }

// write has a file appear with all of its content.
func write(file string, text []byte, place func(from, to string) error) error {
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return place(f.Name(), file)
}
