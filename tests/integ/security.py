"""What tests show to secured ports, and a CA with certificates and token files made on the spot."""
import datetime
import pathlib
import subprocess

import grpc

OPERATOR_METHODS = ("GetServer", "GetStatus")


class Access:
    """Tokens by kind of method, and channel credentials (None = plain text)."""

    def __init__(self, client=None, operator=None, creds=None, name=None):
        self.client, self.operator, self.creds = client, operator, creds
        self.options = [("grpc.ssl_target_name_override", name)] if name else []

    def token_for(self, method):
        return self.operator if method in OPERATOR_METHODS else self.client


def openssl(*args, **kw):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, **kw)


class Authority:
    """A CA in a folder; issue() makes NAME.pem and NAME.key there."""

    def __init__(self, folder, name="ca"):
        self.folder, self.name = pathlib.Path(folder), name
        self.ca = self.folder / f"{name}.pem"
        self.key = self.folder / f"{name}.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
                "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.ca)

    def issue(self, name, san="DNS:localhost,IP:127.0.0.1", days=30, cn=None, kind="ec"):
        """days < 0: it has expired."""
        cert, key, csr, ext = (self.folder / f"{name}.{e}" for e in ("pem", "key", "csr", "ext"))
        alg = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"] if kind == "ec" else ["-newkey", "rsa:2048"]
        openssl("req", "-new", *alg, "-nodes", "-subj", f"/CN={cn or name}", "-keyout", key, "-out", csr)
        ext.write_text(f"subjectAltName={san}\nbasicConstraints=CA:FALSE\n")
        if days >= 0:
            openssl("x509", "-req", "-in", csr, "-CA", self.ca, "-CAkey", self.key, "-CAcreateserial", "-days", days,
                    "-extfile", ext, "-out", cert)
        else:  # `x509 -req` cannot date back
            now = datetime.datetime.now(datetime.timezone.utc)
            stamp = [(now + datetime.timedelta(days=d)).strftime("%Y%m%d%H%M%SZ") for d in (days - 10, days)]
            (self.folder / "index.txt").write_text("")
            conf = self.folder / "ca.cnf"
            conf.write_text(f"[ca]\ndefault_ca=d\n[d]\ndatabase={self.folder}/index.txt\n"
                            f"new_certs_dir={self.folder}\nrand_serial=yes\ndefault_md=sha256\npolicy=p\n"
                            "unique_subject=no\n[p]\ncommonName=supplied\n")
            openssl("ca", "-config", conf, "-batch", "-in", csr, "-cert", self.ca, "-keyfile", self.key,
                    "-startdate", stamp[0], "-enddate", stamp[1], "-extfile", ext, "-notext", "-out", cert)
        return cert, key


def credentials(ca, pair=None):
    cert, key = ([p.read_bytes() for p in pair] if pair else (None, None))
    return grpc.ssl_channel_credentials(pathlib.Path(ca).read_bytes(), key, cert)


CLIENT, GATEWAY = "client-token-canary-1111", "gateway-token-canary-1111"
OPERATOR, CLUSTER = "operator-token-canary-2222", "cluster-token-canary-3333"
SCRAPER = "scraper-token-canary-5555"


class Tokens:
    """Files of tokens for a whole cluster."""

    def __init__(self, folder):
        self.clients, self.operators, self.cluster, self.scrapers = (
            pathlib.Path(folder) / n for n in ("clients", "operators", "cluster", "scrapers"))
        self.scrapers.write_text(f"{SCRAPER} prometheus\n")
        self.clients.write_text(f"# clients\n{CLIENT} team-a\n{GATEWAY} *\n")
        self.operators.write_text(f"{OPERATOR} alice  # the only one\n")
        self.cluster.write_text(f"{CLUSTER}\n")
        self.node_args = [f"--security.operators_file={self.operators}", f"--security.cluster_file={self.cluster}"]
        self.router_args = [*self.node_args, f"--security.clients_file={self.clients}",
                            f"--security.scrapers_file={self.scrapers}"]
